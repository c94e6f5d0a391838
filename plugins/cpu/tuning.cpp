#include "tuning.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "cpu_isa.h"
#include "memory.h"
#include "registry.h"
#include "threads.h"

namespace ingot {
namespace {

struct Call {
  const Kernel* kernel;
  const MatmulArgs* args;
  std::byte* shared;
};

double time_call(Call& call, int threads) {
  const auto begin = std::chrono::steady_clock::now();
  ThreadPool::instance().run(
      threads,
      [](void* context, const Team& team) {
        const Call& self = *static_cast<const Call*>(context);
        Team mine = team;
        mine.shared = self.shared;
        self.kernel->run(self.args, mine);
      },
      &call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A number that is neither large nor tiny in float32 and in bf16, and bytes that int8 kernels take.
void fill(Region& region) { std::fill_n(reinterpret_cast<uint32_t*>(region.data()), region.bytes() / 4, 0x3C003C00u); }

}  // namespace

double time_matmul(const std::string& kernel, int64_t rows, int64_t n, int64_t k, int64_t group, bool gated,
                   int64_t panel_bytes, int tactic, int threads, double seconds) {
  const Kernel* found = find_kernel(kernel);
  if (found == nullptr || found->op() != "matmul" || !isa_includes(detect_isa(), found->isa()))
    throw std::invalid_argument("this machine cannot run a product by " + kernel);
  constexpr int64_t kMost = 1 << 24;
  const auto fits = [](int64_t value) { return value >= 1 && value <= kMost; };
  if (!fits(rows) || !fits(n) || !fits(k) || !fits(panel_bytes) || (gated && n % 2 != 0) || tactic < 0 || tactic > 1 ||
      threads < 1 || threads > ThreadPool::kMaxThreads)
    throw std::invalid_argument("this is no product that could be timed");
  const int64_t out = gated ? n / 2 : n, panels = (gated ? 2 : 1) * ((out + 15) / 16);
  Region weight(static_cast<size_t>(panels * panel_bytes), false), x(static_cast<size_t>(rows * k * 4), false);
  Region y(static_cast<size_t>(rows * out * 4), false);
  fill(weight);
  fill(x);
  const Piece piece{0, panels, weight.data()};
  const MatmulArgs args{.x = reinterpret_cast<const float*>(x.data()), .pieces = &piece, .num_pieces = 1,
                        .num_panels = panels, .bias = nullptr, .residual = nullptr,
                        .y = reinterpret_cast<float*>(y.data()), .rows = rows, .n = n, .k = k,
                        .activation = Activation::kNone, .gated = gated, .group = group, .tactic = tactic};
  Region shared(found->scratch == nullptr ? 64 : std::max<size_t>(found->scratch(&args), 64), false);
  Call call{found, &args, shared.data()};
  double best = time_call(call, threads), total = best;
  for (int i = 1; i < 100 && (i < 2 || total < seconds); ++i) {
    const double time = time_call(call, threads);
    best = std::min(best, time);
    total += time;
  }
  return best;
}

}  // namespace ingot
