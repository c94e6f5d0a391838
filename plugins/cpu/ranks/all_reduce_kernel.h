// y = ((part 0 + part 1) + (part 2 + part 3)) + ...: the parts lie where their ranks have written them, 4 bytes each of
// every rank in, and 4 out. Bound by memory that other cores have just written.
#pragma once

#include <algorithm>

#include "ingot/kernel.h"
#include "ranks/all_reduce_args.h"

namespace ingot {
namespace {

constexpr int64_t kTogether = 256;  // numbers whose sums are in the first cache

// The sum of the parts of `count` ranks from `rank` on.
void add_parts(const AllReduceArgs& args, int rank, int count, int64_t begin, int64_t n, float* to) {
  if (count == 1) {
    std::copy_n(args.group->of(args.meeting.slot, rank) + begin, n, to);
    return;
  }
  float right[kTogether];
  add_parts(args, rank, count / 2, begin, n, to);
  add_parts(args, rank + count / 2, count / 2, begin, n, right);
  for (int64_t i = 0; i < n; ++i) to[i] += right[i];
}

void all_reduce(const AllReduceArgs& args, const Team& team) {
  const int64_t size = args.rows * args.cols;
  if (!args.group->bring(team, args.meeting, args.x, size, static_cast<size_t>(size) * sizeof(float))) return;
  const Team::Range mine = team.share(size);
  for (int64_t i = mine.begin; i < mine.end; i += kTogether)
    add_parts(args, 0, args.group->places(), i, std::min(kTogether, mine.end - i), args.y + i);
}

}  // namespace
}  // namespace ingot
