// The matrix instructions of warpgroups (plugins/cuda/kernels/wgmma.cuh) on the emulated device.
//
// In one order of threads a product is computed when its thread waits for it, so that it sees what shared memory holds
// then; in the other at once. Until the wait its sums are NaN. Errors: descriptors and addresses that the layouts do
// not allow, a batch without group_begin(), products that are not waited for, and warps of a group that do not do the
// same.
#pragma once

#include "emulated_device.h"

#define INGOT_SHARED_WIDE(name) INGOT_SHARED(name)

namespace emulated {

struct GroupProduct {
  float* sum;  // [columns / 2]
  int columns;
  uint64_t a, b;             // descriptors
  const uint32_t* fragment;  // or null: the lane's part of a
  bool keep, transposed;
  unsigned bytes;  // of a number
  float (*number)(uint16_t bits);
};

void begin_group();
void queue_product(const GroupProduct& product);
void commit_products();
void wait_products(int pending);

void start_groups(size_t threads);  // of a new block
void check_groups();                // at a barrier, and at the end
void check_ended();

}  // namespace emulated

inline void let_units_see() {}
template <int kThreads>
void meet_groups() {
  if (emulated::block_size.x != static_cast<unsigned>(kThreads))
    emulated::fail("a barrier of another number of threads");
  emulated::barrier();
}
inline void group_begin() { emulated::begin_group(); }
inline void group_commit() { emulated::commit_products(); }
template <int kPending>
void group_wait() {
  emulated::wait_products(kPending);
}
template <int kPending, int kCount>
void group_wait(float (&)[kCount]) {
  emulated::wait_products(kPending);
}

template <class T, int kColumns>
struct GroupProduct {
  static constexpr unsigned kBytes = sizeof(T);
  static float number(uint16_t bits) {
    if constexpr (kBytes == 1) {
      return fp8_to_float(bits);
    } else {
      return half_to_float<T>(bits, 0);
    }
  }
  template <bool kTransposed>
  static void of(float (&sum)[kColumns / 2], uint64_t a, uint64_t b, bool keep) {
    emulated::queue_product({sum, kColumns, a, b, nullptr, keep, kTransposed, kBytes, &number});
  }
  template <bool kTransposed>
  static void of(float (&sum)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool keep) {
    emulated::queue_product({sum, kColumns, 0, b, a, keep, kTransposed, kBytes, &number});
  }
};
