// y[r, g] = a range of x[r, g], one row per turn: 4 bytes in and 4 out per element.
#pragma once

#include <cstring>

#include "ingot/kernel.h"
#include "rows/take_columns_args.h"

namespace ingot {
namespace {

void take_columns(const TakeColumnsArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  for (int64_t i = mine.begin * args.groups; i < mine.end * args.groups; ++i)
    std::memcpy(args.y + i * args.count, args.x + i * args.of + args.first,
                static_cast<size_t>(args.count) * sizeof(float));
}

}  // namespace
}  // namespace ingot
