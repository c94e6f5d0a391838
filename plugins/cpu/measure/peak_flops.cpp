#include "measure/peak_flops.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>

#include "isa/cpu_isa.h"
#include "threads/threads.h"

namespace ingot {
namespace {

constexpr int64_t kRounds = 5'000;  // of a run: about a millisecond
constexpr size_t kSumBytes = 64 << 10;
const PeakLoop* const kLoops[] = {&kPeakF32Avx2,    &kPeakInt8Avx2,   &kPeakInt8AvxVnni, &kPeakF32Avx512,
                                  &kPeakInt8Avx512, &kPeakBf16Avx512, &kPeakBf16Amx,     &kPeakInt8Amx};

std::unique_ptr<PeakData> random_data() {
  auto data = std::make_unique<PeakData>();
  std::minstd_rand draw(1);
  std::uniform_real_distribution<float> number(-1, 1);
  for (float& each : data->numbers) each = number(draw);
  for (int8_t& each : data->bytes) each = static_cast<int8_t>(draw() >> 8);
  for (uint16_t& each : data->halves) {
    const float value = number(draw);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    each = static_cast<uint16_t>(bits >> 16);
  }
  return data;
}

struct Run {
  const PeakLoop* loop;
  const PeakData* data;
};

double time_run(const Run& run, int threads) {
  const auto begin = std::chrono::steady_clock::now();
  ThreadPool::instance().run(
      threads,
      [](void* context, const Team& team) {
        const Run& self = *static_cast<const Run*>(context);
        self.loop->run(*self.data, team.scratch(kSumBytes), kRounds);
      },
      const_cast<Run*>(&run));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double peak_flops(const std::string& name, int threads, double seconds) {
  const auto* const found = std::ranges::find_if(kLoops, [&name](const PeakLoop* loop) { return loop->name == name; });
  const std::string isa = name.substr(name.find('.') + 1);
  if (found == std::end(kLoops) || !offers_isa(isa))
    throw std::invalid_argument("this machine has no arithmetic " + name);
  if (threads < 1 || threads > ThreadPool::kMaxThreads || !(seconds >= 0 && seconds <= 60))
    throw std::invalid_argument("peak_flops wants 1 to 256 threads and at most 60 seconds");
  const auto data = random_data();
  const Run run{*found, data.get()};
  const auto operations = static_cast<double>((*found)->operations * kRounds * threads);
  double total = 0, best = 0;
  do {
    const double taken = time_run(run, threads);
    total += taken;
    best = std::max(best, operations / taken);
  } while (total < seconds);
  return best;
}

}  // namespace ingot
