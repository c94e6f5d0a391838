// Kernels that use each matrix instruction of wgmma.cuh once: y[64][kColumns] (+)= a[64][64] * b. b: [kColumns][64], or
// [64][128] where it is described by columns. Of FP8, a is [64][128], and b [kColumns][128]: also for the instruction
// of warps in matrix_units.cuh.
#pragma once

#include "wgmma.cuh"

struct alignas(16) Piece {
  uint32_t words[4];
};

// kAs: 0: a in shared memory; 1: in registers
template <class T, int kColumns, bool kTransposed, int kAs>
INGOT_DEVICE void multiply_once(float* y, const Piece* a, const Piece* b, int keep, unsigned char* tiles) {
  constexpr int kPanel = 64 * kWideLine;
  unsigned char* right = tiles + kPanel;
  for (int i = threadIdx.x; i < 64 * 8; i += kGroup) copy_async(tiles + wide_place(i / 8, i % 8), a + i, true);
  if (kTransposed) {
    for (int i = threadIdx.x; i < 64 * 16; i += kGroup) {
      copy_async(right + i % 16 / 8 * kPanel + wide_place(i / 16, i % 8), b + i, true);
    }
  } else {
    for (int i = threadIdx.x; i < kColumns * 8; i += kGroup) copy_async(right + wide_place(i / 8, i % 8), b + i, true);
  }
  copy_commit();
  copy_wait<0>();
  let_units_see();
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint32_t left[4][4];
  if (kAs) {
    for (int i = 0; i < 16; ++i) {
      const int line = 16 * warp + lane / 4 + i % 2 * 8, word = i / 4 * 8 + lane % 4 + i / 2 % 2 * 4;
      left[i / 4][i % 4] = reinterpret_cast<const uint32_t*>(a)[line * 32 + word];
    }
  }
  float sum[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 1.f;
  group_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t of = kTransposed ? describe_columns(right, kPanel, step) : describe_rows(right, step);
    if constexpr (kAs) {
      group_multiply<T, kColumns, kTransposed>(sum, left[step], of, keep || step);
    } else {
      group_multiply<T, kColumns, kTransposed>(sum, describe_rows(tiles, step), of, keep || step);
    }
  }
  group_commit();
  group_wait<0>(sum);
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    y[row * kColumns + column] = sum[i];
  }
}

#define INGOT_GROUP_KERNEL(name, T, kColumns, kTransposed, kAs)         \
  INGOT_KERNEL(kGroup)                                                  \
  name(float* y, const Piece* a, const Piece* b, int keep) {            \
    INGOT_SHARED_WIDE(tiles);                                           \
    multiply_once<T, kColumns, kTransposed, kAs>(y, a, b, keep, tiles); \
  }
INGOT_GROUP_KERNEL(rows_16, BF16, 16, false, 0)
INGOT_GROUP_KERNEL(rows_32, F16, 32, false, 0)
INGOT_GROUP_KERNEL(rows_64, BF16, 64, false, 0)
INGOT_GROUP_KERNEL(rows_128, BF16, 128, false, 0)
INGOT_GROUP_KERNEL(rows_192, BF16, 192, false, 0)
INGOT_GROUP_KERNEL(rows_256, F16, 256, false, 0)
INGOT_GROUP_KERNEL(registers_80, BF16, 80, false, 1)
INGOT_GROUP_KERNEL(registers_96, F16, 96, false, 1)
INGOT_GROUP_KERNEL(columns_64, F16, 64, true, 0)
INGOT_GROUP_KERNEL(columns_112, BF16, 112, true, 1)
INGOT_GROUP_KERNEL(columns_128, BF16, 128, true, 1)
INGOT_GROUP_KERNEL(fp8_16, E4M3, 16, false, 0)
INGOT_GROUP_KERNEL(fp8_64, E4M3, 64, false, 0)
INGOT_GROUP_KERNEL(fp8_128, E4M3, 128, false, 0)

// A warp multiplies 16 rows of a and eight columns. Words of four k lie in the lanes as the PTX manual says.
INGOT_KERNEL(kGroup)
warps_8(float* y, const Piece* a, const Piece* b, int keep) {
  const int warp = threadIdx.x / kWarp, row = threadIdx.x % kWarp / 4, quad = threadIdx.x % 4;
  const auto word = [](const Piece* of, int line, int four) { return of[line * 8 + four / 4].words[four % 4]; };
  float sum[4] = {1.f, 1.f, 1.f, 1.f};
  for (int slice = 0; slice < 4; ++slice) {
    const int first = 16 * warp + row, four = 8 * slice + quad;
    const uint32_t left[4] = {word(a, first, four), word(a, first + 8, four), word(a, first, four + 4),
                              word(a, first + 8, four + 4)};
    if (keep || slice) {
      multiply_add_fp8(sum, left, word(b, row, four), word(b, row, four + 4));
    } else {
      multiply_fp8(sum, left, word(b, row, four), word(b, row, four + 4));
    }
  }
  for (int i = 0; i < 4; ++i) y[(16 * warp + row + i / 2 * 8) * 8 + 2 * quad + i % 2] = sum[i];
}
