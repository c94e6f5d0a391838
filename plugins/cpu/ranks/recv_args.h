// What kernels of recv take.
#pragma once

#include <cstdint>

#include "ranks/rank_group.h"

namespace ingot {

// Rows that the stage before has sent, see plugins/ops/recv.py.
struct RecvArgs {
  RankGroup* group;
  Message message;
  float* y;  // [rows, cols]
  int64_t rows, cols;
};

}  // namespace ingot
