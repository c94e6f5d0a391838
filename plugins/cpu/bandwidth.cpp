#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "memory.h"
#include "threads.h"

namespace ingot {
namespace {

struct Reading {
  uint64_t* words;
  int64_t count;
  bool fill;  // the first pass writes, so that pages exist and lie near the thread that reads them
  std::atomic<uint64_t> sum{0};
};

void read_share(void* context, const Team& team) {
  Reading& reading = *static_cast<Reading*>(context);
  const Team::Range lines = team.share(reading.count / 8);  // of 64 bytes
  uint64_t* const begin = reading.words + lines.begin * 8;
  uint64_t* const end = reading.words + lines.end * 8;
  if (reading.fill) return std::fill(begin, end, 1);
  uint64_t sums[8] = {};
  for (const uint64_t* line = begin; line < end; line += 8)
    for (int i = 0; i < 8; ++i) sums[i] += line[i];
  for (const uint64_t sum : sums) reading.sum.fetch_add(sum);
}

}  // namespace

double read_bandwidth(int64_t bytes, int threads, int passes) {
  if (bytes < 4096 || threads < 1 || threads > ThreadPool::kMaxThreads || passes < 1)
    throw std::invalid_argument("read_bandwidth wants at least 4096 bytes, 1 to 256 threads and one pass");
  const Region region(static_cast<size_t>(bytes), true);
  Reading reading{reinterpret_cast<uint64_t*>(region.data()), bytes / 8, true};
  ThreadPool& pool = ThreadPool::instance();
  pool.run(threads, read_share, &reading);
  reading.fill = false;
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(threads, read_share, &reading);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / seconds.count());
  }
  return best;
}

}  // namespace ingot
