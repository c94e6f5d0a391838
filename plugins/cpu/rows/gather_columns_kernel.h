// y[r, i] = x[r, order[i]], one row per turn: 8 bytes in and 4 out per element. A number that is none of a column,
// which a damaged engine may hold, counts as the nearest one; NaN as the first.
#pragma once

#include <algorithm>

#include "ingot/kernel.h"
#include "rows/gather_columns_args.h"

namespace ingot {
namespace {

void gather_columns(const GatherColumnsArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  const float last = static_cast<float>(args.cols - 1);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const float* const x = args.x + r * args.cols;
    float* const y = args.y + r * args.count;
    for (int64_t i = 0; i < args.count; ++i)
      y[i] = x[static_cast<int32_t>(std::min(std::max(0.0f, args.order[i]), last))];
  }
}

}  // namespace
}  // namespace ingot
