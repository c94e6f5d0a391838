// What kernels of all_reduce take.
#pragma once

#include <cstdint>

#include "ranks/rank_group.h"

namespace ingot {

// y = the sum of what all ranks have brought, see plugins/ops/all_reduce.py.
struct AllReduceArgs {
  RankGroup* group;
  Meeting meeting;
  const float* x;  // null where it lies in the slot
  float* y;        // [rows, cols]
  int64_t rows, cols;
  bool common = false;  // y is the memory of the first rank's part, where all ranks read it
};

}  // namespace ingot
