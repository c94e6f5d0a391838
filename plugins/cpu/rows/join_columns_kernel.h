// The rows of two or three matrices side by side, one row per turn: 4 bytes in and 4 out per element.
#pragma once

#include <algorithm>

#include "ingot/kernel.h"
#include "rows/join_columns_args.h"

namespace ingot {
namespace {

void join_columns(const JoinColumnsArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  int64_t cols = 0;
  for (const int64_t part : args.cols) cols += part;
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    float* to = args.y + r * cols;
    for (int i = 0; i < JoinColumnsArgs::kMost; ++i)
      to = std::copy_n(args.parts[i] + r * args.cols[i], args.cols[i], to);
  }
}

}  // namespace
}  // namespace ingot
