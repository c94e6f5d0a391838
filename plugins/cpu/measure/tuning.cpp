#include "measure/tuning.h"

#include <emmintrin.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <stdexcept>
#include <vector>

#include "execution/binder.h"
#include "execution/memory.h"
#include "execution/registry.h"
#include "isa/cpu_isa.h"
#include "matmul/matmul_args.h"
#include "moe/moe_matmul_args.h"
#include "threads/threads.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLine = 64;  // bytes

struct Call {
  const Kernel* kernel;
  const void* args;
  std::byte* shared;
  const Region* weight;  // that is to come from memory, as in a step, which reads many others in between; or null
  std::vector<Clock::time_point> begins;  // of each thread: the first one of them may be ahead of the others
};

double time_call(Call& call, int threads) {
  call.begins.assign(static_cast<size_t>(threads), Clock::time_point::max());
  ThreadPool::instance().run(
      threads,
      [](void* context, const Team& team) {
        Call& self = *static_cast<Call*>(context);
        const Team::Range lines = team.share(self.weight ? static_cast<int64_t>(self.weight->bytes()) / kLine : 0);
        for (int64_t line = lines.begin; line < lines.end; ++line) _mm_clflush(self.weight->data() + line * kLine);
        _mm_mfence();
        team.barrier();
        self.begins[static_cast<size_t>(team.index)] = Clock::now();
        Team mine = team;
        mine.shared = self.shared;
        self.kernel->run(self.args, mine);
      },
      &call);
  const auto begin = *std::min_element(call.begins.begin(), call.begins.end());
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The fastest of several calls; `prepare` runs before each, untimed.
template <typename Prepare>
double time_calls(const Kernel& kernel, const void* args, const Region* weight, int threads, double seconds,
                  Prepare prepare) {
  Region shared(kernel.scratch == nullptr ? 64 : std::max<size_t>(kernel.scratch(args), 64), false);
  Call call{&kernel, args, shared.data(), weight, {}};
  prepare();
  double best = time_call(call, threads), total = best;
  for (int i = 1; i < 100 && (i < 2 || total < seconds); ++i) {
    prepare();
    const double time = time_call(call, threads);
    best = std::min(best, time);
    total += time;
  }
  return best;
}

constexpr uint32_t kNumber =
    0x3C003C00u;  // neither large nor tiny in float32 and in bf16, and bytes that int8 kernels take

Region filled(int64_t bytes) {
  Region region(static_cast<size_t>(bytes), static_cast<size_t>(bytes) >= kHugePage);  // as weights of a session
  std::fill_n(reinterpret_cast<uint32_t*>(region.data()), region.bytes() / 4, kNumber);
  return region;
}

float* floats(Region& region) { return reinterpret_cast<float*>(region.data()); }

// Rows as they are in a model: most numbers are much smaller than the largest, which sets how coarsely they are
// rounded.
Region rows_of_x(int64_t count) {
  Region region(static_cast<size_t>(count) * sizeof(float), false);
  constexpr int64_t kPeriod = 8192;
  std::minstd_rand random;
  std::uniform_real_distribution<float> part(-1.0f, 1.0f);
  float* const x = floats(region);
  std::generate_n(x, std::min(count, kPeriod),
                  [&] { return part(random) + part(random) + part(random) + part(random); });
  for (int64_t i = kPeriod; i < count; ++i) x[i] = x[i - kPeriod];
  return region;
}

bool fits(int64_t value, int64_t most = 1 << 24) { return value >= 1 && value <= most; }

void require_product(bool holds) {
  if (!holds) throw std::invalid_argument("this is no product that could be timed");
}

const Kernel& find_runnable(const std::string& name) {
  const Kernel* found = find_kernel(name);
  if (found == nullptr || !offers_isa(found->isa()))
    throw std::invalid_argument("this machine cannot run a product by " + name);
  return *found;
}

// Experts of each row, ascending.
void choose_experts(int64_t rows, int64_t experts, int64_t slots, float* ids) {
  std::minstd_rand random;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t e = 0, left = slots; left > 0; ++e)
      if (static_cast<int64_t>(random() % static_cast<uint32_t>(experts - e)) < left) {
        *ids++ = static_cast<float>(e);
        --left;
      }
}

}  // namespace

double time_matmul(const std::string& kernel, int64_t rows, int64_t n, int64_t k, int64_t group, bool gated,
                   int64_t panel_bytes, int tactic, int threads, double seconds) {
  const Kernel& found = find_runnable(kernel);
  require_product(found.op() == "matmul" && fits(rows) && fits(n) && fits(k) && fits(panel_bytes) &&
                  !(gated && n % 2 != 0) && tactic >= 0 && tactic < tactics_of(found) &&
                  fits(threads, ThreadPool::kMaxThreads));
  const int64_t out = gated ? n / 2 : n, panels = (gated ? 2 : 1) * ((out + 15) / 16);
  Region weight = filled(panels * panel_bytes), x = rows_of_x(rows * k), y(static_cast<size_t>(rows * out * 4), false);
  const WeightSlice piece{0, panels, weight.data()};
  const MatmulArgs args{.x = floats(x),
                        .pieces = &piece,
                        .num_pieces = 1,
                        .num_panels = panels,
                        .bias = nullptr,
                        .residual = nullptr,
                        .y = floats(y),
                        .rows = rows,
                        .n = n,
                        .k = k,
                        .activation = gated ? Activation::kSilu : Activation::kNone,
                        .gated = gated,
                        .group = group,
                        .tactic = tactic};
  return time_calls(found, &args, &weight, threads, seconds, [] {});
}

double time_experts(const std::string& kernel, int64_t rows, int64_t experts, int64_t slots, int64_t n, int64_t k,
                    int64_t group, bool gated, int64_t panel_bytes, int tactic, int threads, double seconds) {
  const Kernel& found = find_runnable(kernel);
  const bool first = found.op() == "moe_gate_up";  // of the two halves
  require_product((first || (found.op() == "moe_down" && !gated)) && fits(rows) && fits(experts, 65535) &&
                  fits(slots, experts) && fits(n) && fits(k) && fits(panel_bytes) && !(gated && n % 2 != 0) &&
                  tactic >= 0 && tactic < tactics_of(found) && fits(threads, ThreadPool::kMaxThreads));
  const int64_t out = gated ? n / 2 : n, panels = (gated ? 2 : 1) * ((out + 15) / 16), taken = rows * slots;
  Region weight = filled(experts * panels * panel_bytes), x = rows_of_x((first ? rows : taken) * k);
  Region y(static_cast<size_t>((first ? taken : rows) * out * 4), false), weights = filled(taken * 4),
                                                                          ids = filled(taken * 4);
  choose_experts(rows, experts, slots, floats(ids));
  const WeightSlice piece{0, panels, weight.data()};
  const MoeMatmulArgs args{.x = floats(x),
                           .ids = floats(ids),
                           .weights = floats(weights),
                           .pieces = &piece,
                           .num_panels = panels,
                           .y = floats(y),
                           .rows = rows,
                           .slots = slots,
                           .experts = experts,
                           .n = n,
                           .k = k,
                           .group = group,
                           .activation = Activation::kSilu,
                           .gated = gated,
                           .tactic = tactic};
  return time_calls(found, &args, nullptr, threads, seconds, [&] {
    for (float* id = floats(ids); id != floats(ids) + taken; ++id)
      *id = static_cast<float>((static_cast<int64_t>(*id) + slots) % experts);
  });
}

}  // namespace ingot
