// The barrier with teams of two sizes in turn: nobody may leave it before all of the team have come.
//
//   barrier_selftest SMALL LARGE RUNS   exit status 1: somebody left early; killed by SIGALRM: all wait for ever
//   barrier_selftest race               two threads write a word with no order between them, for ThreadSanitizer to
//   report
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "threads/threads.h"

namespace ingot {
namespace {

constexpr int kBarriers = 3;

struct Arrivals {
  std::atomic<int64_t> at[ThreadPool::kMaxThreads];
  std::atomic<int64_t> early{0};
  int64_t before = 0;  // barriers of all earlier runs of the large team
};

void come(void* context, const Team& team) {
  auto& arrivals = *static_cast<Arrivals*>(context);
  for (int64_t barrier = arrivals.before + 1; barrier <= arrivals.before + kBarriers; ++barrier) {
    arrivals.at[team.index].store(barrier);
    team.barrier();
    for (int i = 0; i < team.count; ++i)
      if (arrivals.at[i].load() < barrier) arrivals.early.fetch_add(1);
  }
}

int take_turns(int small, int large, long runs) {
  ThreadPool& pool = ThreadPool::instance();
  Arrivals arrivals;
  int64_t words[ThreadPool::kMaxThreads] = {};
  for (long i = 0; i < runs; ++i) {
    pool.run(small, [](void* own, const Team& team) { static_cast<int64_t*>(own)[team.index] += 1; }, words);
    pool.run(large, come, &arrivals);
    arrivals.before += kBarriers;
  }
  std::printf("%d then %d threads, %ld runs: %ld times early\n", small, large, runs,
              static_cast<long>(arrivals.early.load()));
  return arrivals.early.load() == 0 ? 0 : 1;
}

int race() {
  int64_t word = 0;
  ThreadPool::instance().run(
      2, [](void* context, const Team& team) { *static_cast<int64_t*>(context) += team.index + 1; }, &word);
  std::printf("raced for %ld\n", static_cast<long>(word));
  return 0;
}

}  // namespace
}  // namespace ingot

int main(int argc, char** argv) {
  alarm(60);
  if (argc == 2 && std::string_view(argv[1]) == "race") return ingot::race();
  if (argc == 4) return ingot::take_turns(std::atoi(argv[1]), std::atoi(argv[2]), std::atol(argv[3]));
  std::fprintf(stderr, "usage: barrier_selftest SMALL LARGE RUNS | race\n");
  return 2;
}
