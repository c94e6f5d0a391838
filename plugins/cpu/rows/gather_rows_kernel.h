// y[r] = x[taken[r]]
#pragma once

#include <cstring>

#include "ingot/kernel.h"
#include "rows/gather_rows_args.h"

namespace ingot {
namespace {

void gather_rows(const GatherRowsArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  for (int64_t r = mine.begin; r < mine.end; ++r)
    std::memcpy(args.y + r * args.cols, args.x + args.taken[r] * args.cols,
                static_cast<size_t>(args.cols) * sizeof(float));
}

}  // namespace
}  // namespace ingot
