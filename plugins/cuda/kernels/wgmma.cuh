// The instructions of sm_90a by which a warpgroup (four warps, the first of which has a number that four divides) uses
// the matrix units: sum[64][N] += a[64][16] * b[16][N], asynchronously. a lies in registers or in shared memory, b in
// shared memory. Of FP8 (E4M3) it is 32 k at a time, and both lie in shared memory by rows. Layouts and rules are in
// the PTX manual (wgmma); tests emulate them.
//
//   A tile of shared memory has lines of 128 bytes, on multiples of 1024 bytes, whose pieces lie at their `wide_place`.
//   rows:    a line holds 64 neighbouring k of one row of a or b; of FP8 128
//   columns: a line holds 64 neighbouring columns of b, all of one k; further 64 columns lie `panel` bytes behind
//
//   let_units_see();                       each thread, behind its stores and copies to shared memory, before a barrier
//   __syncthreads();
//   group_begin();                         before the first multiply of a batch
//   group_multiply<BF16, 128>(sum, a, b);  of one batch as many as there are; a, b: descriptors, a also registers
//   group_commit();
//   group_wait<0>(sum);                    now sum may be read, and what a and b described be written again
#pragma once

#include "matrix_units.cuh"

constexpr int kWideAlign = 1024;
constexpr int kGroup = 4 * kWarp;  // threads

// A number of FP8.
struct E4M3 {
  uint8_t bits;
};

#ifdef __CUDACC__
#define INGOT_SHARED_WIDE(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

// What shared memory holds at `tile`: eight lines after the other. Also of the 16 k from k = 16 * step on (rows), or of
// lines from 16 * step on (columns; of b alone). Of FP8, 32 k from k = 32 * step on.
#ifdef __CUDACC__
INGOT_DEVICE uint64_t shared_address(const void* of) { return __cvta_generic_to_shared(of); }
#else
INGOT_DEVICE uint64_t shared_address(const void* of) {
  return static_cast<uint64_t>(static_cast<const unsigned char*>(of) - emulated::shared_memory());
}
#endif
constexpr uint64_t kSwizzled = (1ull << 62) | (static_cast<uint64_t>(kWideAlign >> 4) << 32);
INGOT_DEVICE uint64_t describe_rows(const void* tile, int step = 0) {
  return kSwizzled | (1ull << 16) | ((shared_address(tile) & 0x3ffff) >> 4) + 2 * step;
}
INGOT_DEVICE uint64_t describe_columns(const void* tile, int panel, int step = 0) {
  return kSwizzled | static_cast<uint64_t>(panel >> 4) << 16 | ((shared_address(tile) & 0x3ffff) >> 4) + 128 * step;
}

#ifdef __CUDACC__
INGOT_DEVICE void let_units_see() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INGOT_DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INGOT_DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending batches are under way. Those of `sum` are over if nothing of them is pending.
template <int kPending>
INGOT_DEVICE void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kPending, int kCount>
INGOT_DEVICE void group_wait(float (&sum)[kCount]) {
  group_wait<kPending>();
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// A barrier of all kThreads of a block, where groups come from different places of the code.
template <int kThreads>
INGOT_DEVICE void meet_groups() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

template <class T, int kColumns>
struct GroupProduct;

#define INGOT_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define INGOT_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define INGOT_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define INGOT_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define INGOT_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define INGOT_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define INGOT_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define INGOT_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define INGOT_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define INGOT_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define INGOT_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define INGOT_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define INGOT_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define INGOT_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define INGOT_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define INGOT_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define INGOT_SUMS(at)                                                                                          \
  "+f"(sum[at]), "+f"(sum[at + 1]), "+f"(sum[at + 2]), "+f"(sum[at + 3]), "+f"(sum[at + 4]), "+f"(sum[at + 5]), \
      "+f"(sum[at + 6]), "+f"(sum[at + 7])
#define INGOT_NAMES_TO_16 INGOT_NAMES_0
#define INGOT_SUMS_TO_16 INGOT_SUMS(0)
#define INGOT_NAMES_TO_32 INGOT_NAMES_TO_16 ", " INGOT_NAMES_1
#define INGOT_SUMS_TO_32 INGOT_SUMS_TO_16, INGOT_SUMS(8)
#define INGOT_NAMES_TO_64 INGOT_NAMES_TO_32 ", " INGOT_NAMES_2 ", " INGOT_NAMES_3
#define INGOT_SUMS_TO_64 INGOT_SUMS_TO_32, INGOT_SUMS(16), INGOT_SUMS(24)
#define INGOT_NAMES_TO_80 INGOT_NAMES_TO_64 ", " INGOT_NAMES_4
#define INGOT_SUMS_TO_80 INGOT_SUMS_TO_64, INGOT_SUMS(32)
#define INGOT_NAMES_TO_96 INGOT_NAMES_TO_80 ", " INGOT_NAMES_5
#define INGOT_SUMS_TO_96 INGOT_SUMS_TO_80, INGOT_SUMS(40)
#define INGOT_NAMES_TO_112 INGOT_NAMES_TO_96 ", " INGOT_NAMES_6
#define INGOT_SUMS_TO_112 INGOT_SUMS_TO_96, INGOT_SUMS(48)
#define INGOT_NAMES_TO_128 INGOT_NAMES_TO_112 ", " INGOT_NAMES_7
#define INGOT_SUMS_TO_128 INGOT_SUMS_TO_112, INGOT_SUMS(56)
#define INGOT_NAMES_TO_192 \
  INGOT_NAMES_TO_128 ", " INGOT_NAMES_8 ", " INGOT_NAMES_9 ", " INGOT_NAMES_10 ", " INGOT_NAMES_11
#define INGOT_SUMS_TO_192 INGOT_SUMS_TO_128, INGOT_SUMS(64), INGOT_SUMS(72), INGOT_SUMS(80), INGOT_SUMS(88)
#define INGOT_NAMES_TO_256 \
  INGOT_NAMES_TO_192 ", " INGOT_NAMES_12 ", " INGOT_NAMES_13 ", " INGOT_NAMES_14 ", " INGOT_NAMES_15
#define INGOT_SUMS_TO_256 INGOT_SUMS_TO_192, INGOT_SUMS(96), INGOT_SUMS(104), INGOT_SUMS(112), INGOT_SUMS(120)

// n0, ...: the numbers of the operands behind the sums.
#define INGOT_GROUP_PRODUCT(T, type, columns, n0, n1, n2, n3, n4, n5, n6)                                              \
  template <>                                                                                                          \
  struct GroupProduct<T, columns> {                                                                                    \
    template <int kTransposed>                                                                                         \
    INGOT_DEVICE static void of(float (&sum)[columns / 2], uint64_t a, uint64_t b, int keep) {                         \
      asm volatile("{\n.reg .pred %%keep;\nsetp.ne.b32 %%keep, %" #n2                                                  \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" INGOT_NAMES_TO_##columns \
                   "}, %" #n0 ", %" #n1 ", %%keep, 1, 1, 0, %" #n3 ";\n\t}\n"                                          \
                   : INGOT_SUMS_TO_##columns                                                                           \
                   : "l"(a), "l"(b), "r"(keep), "n"(kTransposed)                                                       \
                   : "memory");                                                                                        \
    }                                                                                                                  \
    template <int kTransposed>                                                                                         \
    INGOT_DEVICE static void of(float (&sum)[columns / 2], const uint32_t (&a)[4], uint64_t b, int keep) {             \
      asm volatile("{\n.reg .pred %%keep;\nsetp.ne.b32 %%keep, %" #n5                                                  \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" INGOT_NAMES_TO_##columns \
                   "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", %%keep, 1, 1, %" #n6 ";\n\t}\n"             \
                   : INGOT_SUMS_TO_##columns                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTransposed)                   \
                   : "memory");                                                                                        \
    }                                                                                                                  \
  };
// n0, ...: likewise.
#define INGOT_FP8_GROUP_PRODUCT(columns, n0, n1, n2)                                                           \
  template <>                                                                                                  \
  struct GroupProduct<E4M3, columns> {                                                                         \
    template <int kTransposed>                                                                                 \
    INGOT_DEVICE static void of(float (&sum)[columns / 2], uint64_t a, uint64_t b, int keep) {                 \
      static_assert(!kTransposed, "FP8 lies by rows");                                                         \
      asm volatile("{\n.reg .pred %%keep;\nsetp.ne.b32 %%keep, %" #n2                                          \
                   ", 0;\n"                                                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" INGOT_NAMES_TO_##columns \
                   "}, %" #n0 ", %" #n1 ", %%keep, 1, 1;\n\t}\n"                                               \
                   : INGOT_SUMS_TO_##columns                                                                   \
                   : "l"(a), "l"(b), "r"(keep)                                                                 \
                   : "memory");                                                                                \
    }                                                                                                          \
  };
INGOT_FP8_GROUP_PRODUCT(16, 8, 9, 10)
INGOT_FP8_GROUP_PRODUCT(64, 32, 33, 34)
INGOT_FP8_GROUP_PRODUCT(128, 64, 65, 66)
INGOT_GROUP_PRODUCT(BF16, "bf16", 16, 8, 9, 10, 11, 12, 13, 14)
INGOT_GROUP_PRODUCT(F16, "f16", 16, 8, 9, 10, 11, 12, 13, 14)
INGOT_GROUP_PRODUCT(BF16, "bf16", 32, 16, 17, 18, 19, 20, 21, 22)
INGOT_GROUP_PRODUCT(F16, "f16", 32, 16, 17, 18, 19, 20, 21, 22)
INGOT_GROUP_PRODUCT(BF16, "bf16", 64, 32, 33, 34, 35, 36, 37, 38)
INGOT_GROUP_PRODUCT(F16, "f16", 64, 32, 33, 34, 35, 36, 37, 38)
INGOT_GROUP_PRODUCT(BF16, "bf16", 80, 40, 41, 42, 43, 44, 45, 46)
INGOT_GROUP_PRODUCT(F16, "f16", 80, 40, 41, 42, 43, 44, 45, 46)
INGOT_GROUP_PRODUCT(BF16, "bf16", 96, 48, 49, 50, 51, 52, 53, 54)
INGOT_GROUP_PRODUCT(F16, "f16", 96, 48, 49, 50, 51, 52, 53, 54)
INGOT_GROUP_PRODUCT(BF16, "bf16", 112, 56, 57, 58, 59, 60, 61, 62)
INGOT_GROUP_PRODUCT(F16, "f16", 112, 56, 57, 58, 59, 60, 61, 62)
INGOT_GROUP_PRODUCT(BF16, "bf16", 128, 64, 65, 66, 67, 68, 69, 70)
INGOT_GROUP_PRODUCT(F16, "f16", 128, 64, 65, 66, 67, 68, 69, 70)
INGOT_GROUP_PRODUCT(BF16, "bf16", 192, 96, 97, 98, 99, 100, 101, 102)
INGOT_GROUP_PRODUCT(F16, "f16", 192, 96, 97, 98, 99, 100, 101, 102)
INGOT_GROUP_PRODUCT(BF16, "bf16", 256, 128, 129, 130, 131, 132, 133, 134)
INGOT_GROUP_PRODUCT(F16, "f16", 256, 128, 129, 130, 131, 132, 133, 134)

#else
#include "group_products.h"
#endif

// sum = a * b, or sum += a * b where `keep`. A lane holds of row 16 * (warp % 4) + lane / 4, + 8 for the upper two of
// four, the columns 8 * (i / 4) + 2 * (lane % 4) + i % 2 as sum[i]. kColumns: 16, 32, 64, 80, 96, 112, 128, 192 or 256;
// of FP8 16, 64 or 128.
// kTransposed: b is described by columns.
template <class T, int kColumns, bool kTransposed = false>
INGOT_DEVICE void group_multiply(float (&sum)[kColumns / 2], uint64_t a, uint64_t b, bool keep = true) {
  GroupProduct<T, kColumns>::template of<kTransposed>(sum, a, b, keep);
}
// a: as multiply_add takes it, of the warp's 16 rows. These registers must keep their values until the wait.
template <class T, int kColumns, bool kTransposed = false>
INGOT_DEVICE void group_multiply(float (&sum)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool keep = true) {
  GroupProduct<T, kColumns>::template of<kTransposed>(sum, a, b, keep);
}
