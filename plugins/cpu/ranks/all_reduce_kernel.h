// y = ((part 0 + part 1) + (part 2 + part 3)) + ...: the parts lie where their ranks have written them. Bound by memory
// that other cores have just written, so the sums of P ranks are made in one of two ways.
//
//     each rank adds everything   one meeting; 4 P bytes of every number in, 4 out, on every rank
//     each rank adds a share      two meetings; the same bytes of 1 / P of the numbers, in the place of part 0: the
//     step
//                                 that reads y takes it from there
#pragma once

#include <algorithm>
#include <cstddef>

#include "ingot/kernel.h"
#include "ranks/all_reduce_args.h"

namespace ingot {
namespace {

constexpr int64_t kTogether = 256;  // numbers whose sums are in the first cache
constexpr int64_t kLine = 16;       // numbers of a cache line, which belongs to one rank

template <int kCount>
float sum_of(const float* const* parts, int64_t i) {
  if constexpr (kCount == 1)
    return parts[0][i];
  else
    return sum_of<kCount / 2>(parts, i) + sum_of<kCount / 2>(parts + kCount / 2, i);
}

// `to` is apart from all parts, or the first of them.
template <int kCount>
void add_few(const float* const* parts, int64_t n, float* to) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = sum_of<kCount>(parts, i);
}

// The sum of the parts of `count` ranks from `rank` on, a power of two of them.
void add_parts(const AllReduceArgs& args, int rank, int count, int64_t begin, int64_t n, float* to) {
  if (count <= 8) {
    const float* parts[8];
    for (int i = 0; i < count; ++i) parts[i] = args.group->of(args.meeting.slot, rank + i) + begin;
    return count == 1   ? add_few<1>(parts, n, to)
           : count == 2 ? add_few<2>(parts, n, to)
           : count == 4 ? add_few<4>(parts, n, to)
                        : add_few<8>(parts, n, to);
  }
  float right[kTogether];
  for (int64_t i = 0; i < n; i += kTogether) {
    const int64_t now = std::min(kTogether, n - i);
    add_parts(args, rank, count / 2, begin + i, now, to + i);
    add_parts(args, rank + count / 2, count / 2, begin + i, now, right);
    const float* const halves[2] = {to + i, right};
    add_few<2>(halves, now, to + i);
  }
}

void all_reduce(const AllReduceArgs& args, const Team& team) {
  RankGroup& group = *args.group;
  const int64_t size = args.rows * args.cols;
  const bool came = group.bring(team, args.meeting, args.x, size, static_cast<size_t>(size) * sizeof(float));
  Team::Range own{0, came ? size : 0};
  if (args.common) {
    const int64_t numbers = own.end, lines = (numbers + kLine - 1) / kLine;
    own = {std::min(numbers, lines * group.place() / group.places() * kLine),
           std::min(numbers, lines * (group.place() + 1) / group.places() * kLine)};
  }
  const Team::Range mine = team.share(own.end - own.begin);
  add_parts(args, 0, group.places(), own.begin + mine.begin, mine.end - mine.begin, args.y + own.begin + mine.begin);
  if (!args.common) return;
  team.barrier();  // of all threads, also of one whose wait has failed: others may not know it yet
  group.meet(team, args.meeting.again(), 0);
}

}  // namespace
}  // namespace ingot
