// y[r] = the columns of all ranks side by side: 4 bytes in and 4 out per element.
#pragma once

#include <cstring>

#include "ingot/kernel.h"
#include "ranks/all_gather_args.h"

namespace ingot {
namespace {

void all_gather(const AllGatherArgs& args, const Team& team) {
  const int own = args.group->place();
  const int64_t numbers = args.rows * (args.first(own + 1) - args.first(own));
  const size_t bytes = static_cast<size_t>(args.rows * args.most()) * sizeof(float);
  if (!args.group->bring(team, args.meeting, args.x, numbers, bytes)) return;
  for (int rank = 0; rank < args.group->places(); ++rank) {
    const int64_t first = args.first(rank), count = args.first(rank + 1) - first;
    const float* part = args.group->of(args.meeting.slot, rank);
    const Team::Range mine = team.share(count);
    for (int64_t row = 0; row < args.rows; ++row)
      std::memcpy(args.y + row * args.columns + first + mine.begin, part + row * count + mine.begin,
                  static_cast<size_t>(mine.end - mine.begin) * sizeof(float));
  }
}

}  // namespace
}  // namespace ingot
