// What kernels of send take.
#pragma once

#include <cstdint>

#include "ranks/rank_group.h"

namespace ingot {

// Rows of a stage go to the next one, see plugins/ops/send.py.
struct SendArgs {
  RankGroup* group;
  Message message;
  const float* x;  // [rows, cols]
  int64_t rows, cols;
};

}  // namespace ingot
