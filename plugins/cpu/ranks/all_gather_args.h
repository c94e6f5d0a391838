// What kernels of all_gather take.
#pragma once

#include <cstdint>

#include "ranks/rank_group.h"

namespace ingot {

// y[r] = the columns of all ranks side by side, see plugins/ops/all_gather.py. Rank i has those from
// columns * i / count on.
struct AllGatherArgs {
  RankGroup* group;
  Meeting meeting;
  const float* x;  // null where it lies in the slot
  float* y;        // [rows, columns]
  int64_t rows, columns;

  int64_t first(int rank) const { return columns * rank / group->places(); }
  int64_t most() const { return (columns + group->places() - 1) / group->places(); }  // of one rank
};

}  // namespace ingot
