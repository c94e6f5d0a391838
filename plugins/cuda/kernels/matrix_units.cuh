// The instructions of sm_80 that attention is made of: asynchronous copies, ldmatrix, mma m16n8k16; and of sm_89, mma
// m16n8k32 of FP8 (E4M3).
// How the 32 lanes hold a fragment (row = lane / 4, pair = lane % 4) is in the PTX manual; tests emulate it.
#pragma once

#include "device.cuh"

// A tile of lines of 128 bytes: piece i of line r, 16 bytes, lies at place i ^ r % 8 of the line, so that who reads the
// same piece of eight lines meets each bank once.
constexpr int kWideLine = 128;  // bytes

// Where piece `piece` of line `line` lies in a tile, in bytes.
INGOT_DEVICE int wide_place(int line, int piece) { return line * kWideLine + ((piece ^ line) & 7) * 16; }

#ifdef __CUDACC__
// 16 bytes from global to shared memory; zeros unless `valid`.
INGOT_DEVICE void copy_async(void* to, const void* from, bool valid) {
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
// Four bytes, likewise.
INGOT_DEVICE void copy_word_async(void* to, const void* from, bool valid) {
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
INGOT_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of the committed groups are still under way.
template <int kPending>
INGOT_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
INGOT_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}
INGOT_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// sum[16x8] += a[16x16] * b[16x8]
template <class T>
INGOT_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
INGOT_DEVICE void multiply_add<BF16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
INGOT_DEVICE void multiply_add<F16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum[16x8] = a[16x32] * b[32x8] of FP8 (E4M3): a word has four neighbouring k. On sm_89 and newer.
INGOT_DEVICE void multiply_fp8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
// sum += the same.
INGOT_DEVICE void multiply_add_fp8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// (x & mask) | more, as one instruction: ptxas makes two of two constants.
INGOT_DEVICE uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t more) {
  uint32_t to;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(to) : "r"(x), "r"(mask), "r"(more));
  return to;
}
// __byte_perm of places from 0 to 7, whose upper bits that one clears first.
INGOT_DEVICE uint32_t bytes_at(uint32_t x, uint32_t y, uint32_t places) {
  uint32_t to;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(to) : "r"(x), "r"(y), "r"(places));
  return to;
}
// x * y + z of two pairs of bf16, each rounded once.
INGOT_DEVICE uint32_t fused_bf16(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t to;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(x), "r"(y), "r"(z));
  return to;
}
#endif
