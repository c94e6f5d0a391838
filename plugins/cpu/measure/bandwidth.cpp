#include "measure/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "execution/memory.h"
#include "threads/threads.h"

namespace ingot {
namespace {

// The first pass writes, so that pages exist and lie near the thread that reads them. What reads fastest depends on the
// CPU: on some its own prefetching does, on others lines have to be asked for at two distances.
enum class Way { kFill, kPlain, kAhead };

struct Reading {
  uint64_t* words;
  int64_t count;
  Way way;
  std::atomic<uint64_t> sum{0};
};

template <bool kAhead>
uint64_t sum_of(const uint64_t* begin, const uint64_t* end) {
  uint64_t sums[8] = {};
  for (const uint64_t* line = begin; line < end; line += 8) {
    if constexpr (kAhead) asm volatile("prefetcht0 4096(%0)\n\tprefetcht1 16384(%0)" : : "r"(line));
    for (int i = 0; i < 8; ++i) sums[i] += line[i];
  }
  return std::accumulate(std::begin(sums), std::end(sums), uint64_t{0});
}

void read_share(void* context, const Team& team) {
  Reading& reading = *static_cast<Reading*>(context);
  const Team::Range lines = team.share(reading.count / 8);  // of 64 bytes
  uint64_t* const begin = reading.words + lines.begin * 8;
  uint64_t* const end = reading.words + lines.end * 8;
  switch (reading.way) {
    case Way::kFill:
      return std::fill(begin, end, 1);
    case Way::kPlain:
      reading.sum.fetch_add(sum_of<false>(begin, end));
      break;
    case Way::kAhead:
      reading.sum.fetch_add(sum_of<true>(begin, end));
      break;
  }
}

}  // namespace

double read_bandwidth(int64_t bytes, int threads, int passes) {
  if (bytes < 4096 || threads < 1 || threads > ThreadPool::kMaxThreads || passes < 1)
    throw std::invalid_argument("read_bandwidth wants at least 4096 bytes, 1 to 256 threads and one pass");
  const Region region(static_cast<size_t>(bytes), true);
  Reading reading{reinterpret_cast<uint64_t*>(region.data()), bytes / 8, Way::kFill};
  ThreadPool& pool = ThreadPool::instance();
  pool.run(threads, read_share, &reading);
  double best = 0;
  for (int pass = 0; pass < 2 * passes; ++pass) {
    reading.way = pass % 2 == 0 ? Way::kPlain : Way::kAhead;
    const auto start = std::chrono::steady_clock::now();
    pool.run(threads, read_share, &reading);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / seconds.count());
  }
  return best;
}

}  // namespace ingot
