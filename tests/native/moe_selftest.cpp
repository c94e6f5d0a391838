// Checks the products of experts of this machine, shared in every way that they have, bit for bit against the plain
// products with one expert's weight, without Python: for sanitizers, and for emulators of CPUs that are not at hand.
// Prints one line per kernel; exit status 1 where one differs.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "execution/registry.h"
#include "ingot/kernel.h"
#include "isa/cpu_isa.h"
#include "matmul/matmul_args.h"
#include "moe/moe_matmul_args.h"
#include "threads/threads.h"

namespace ingot {
namespace {

struct Shape {
  int64_t rows, experts, slots, out, k;  // out: columns of one slot's result
  int threads, pieces;
};

// The step's scratch, of which every byte is poison.
void run_kernel(const Kernel& kernel, const void* args, int threads) {
  struct Run {
    const Kernel* kernel;
    const void* args;
    std::vector<std::byte> shared;
  };
  Run run{&kernel, args, std::vector<std::byte>((kernel.scratch ? kernel.scratch(args) : 0) + 64, std::byte{0xFF})};
  const auto job = [](void* context, const Team& team) {
    Run& todo = *static_cast<Run*>(context);
    Team mine = team;
    const auto address = reinterpret_cast<uintptr_t>(todo.shared.data());
    mine.shared = todo.shared.data() + (64 - address % 64) % 64;
    todo.kernel->run(todo.args, mine);
  };
  ThreadPool::instance().run(threads, job, &run);
}

// Random numbers as inputs, and panels of random numbers: what a panel's numbers mean is the plain product's affair.
struct Case {
  Shape shape;
  bool gated;
  std::string dtype;  // of the weight
  int64_t group;      // of w4
  std::vector<float> x, ids, weights;
  std::vector<std::vector<std::byte>> storage;  // of the pieces
  std::vector<WeightSlice> pieces;

  int64_t panels() const { return (shape.out + 15) / 16 * (gated ? 2 : 1); }
  int64_t data_offset() const {  // scales and sums, then multipliers
    if (dtype == "w8") return 128;
    return dtype == "w4" ? 128 + ((shape.k + 127) / 128 * 128 / group * 16 + 63) / 64 * 64 : 0;
  }
  int64_t panel_bytes() const {
    const int64_t k_of_tile = dtype == "bf16" ? 32 : dtype == "w8" ? 64 : 128;
    return dtype == "f32" ? shape.k * 64 : data_offset() + (shape.k + k_of_tile - 1) / k_of_tile * 1024;
  }
  int64_t n() const { return gated ? 2 * shape.out : shape.out; }

  Case(const Shape& s, bool is_gated, const std::string& of)
      : shape(s), gated(is_gated), dtype(of), group(of == "w4" ? 32 << s.k % 3 : 0) {
    std::mt19937 random(static_cast<uint32_t>(s.rows * 7919 + s.out * 31 + s.k));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < s.rows * (gated ? 1 : s.slots) * s.k; ++i) x.push_back(normal(random));
    for (int64_t row = 0; row < s.rows; ++row)
      for (int64_t slot = 0, left = s.slots, e = 0; slot < s.slots; ++e)
        if (static_cast<int64_t>(random() % static_cast<uint32_t>(s.experts - e)) < left) {
          ids.push_back(static_cast<float>(e));
          weights.push_back(std::fabs(normal(random)));
          ++slot;
          --left;
        }
    const int64_t width = gated ? 2 : 1, units = panels() / width;
    for (int64_t i = 0; i < s.pieces; ++i) {
      const int64_t begin = units * i / s.pieces * width, end = units * (i + 1) / s.pieces * width;
      auto& data = storage.emplace_back(static_cast<size_t>(s.experts * (end - begin) * panel_bytes()));
      pieces.push_back({begin, end, data.data()});
      if (group > 0 || dtype == "w8") {
        fill_quantised(data, random);
        continue;
      }
      auto* bits = reinterpret_cast<uint16_t*>(data.data());
      for (size_t j = 0; j < data.size() / 2; ++j)  // finite as bf16, and as the upper half of float32
        bits[j] = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
    }
  }

  // Scales of any size, multipliers from -15 to 15 without 0, integers of int8 without -128, any codes of int4; zeros
  // beyond K; the sums of all columns.
  void fill_quantised(std::vector<std::byte>& data, std::mt19937& random) const {
    std::normal_distribution<float> normal;
    const auto small = [&random](uint32_t count) { return static_cast<int>(random() % count); };
    for (size_t panel = 0; panel < data.size(); panel += static_cast<size_t>(panel_bytes())) {
      for (size_t i = 0; i < 16; ++i) {
        const float scale = normal(random);
        std::memcpy(data.data() + panel + i * sizeof(scale), &scale, sizeof(scale));
      }
      for (int64_t i = 128; i < panel_bytes(); ++i) {
        const int byte = i < data_offset() ? (1 + small(15)) * (small(2) ? 1 : -1)
                         : group           ? small(256)
                                           : small(255) - 127;
        data[panel + static_cast<size_t>(i)] = static_cast<std::byte>(byte);
      }
      clear_padding(data.data() + panel);
      std::memset(data.data() + panel + 64, 0, 64);
      for (int64_t i = 0; i < panel_bytes() - data_offset(); ++i) add_to_sums(data.data() + panel, i);
    }
  }

  // The k of the byte i of a panel's integers; of int4 that of its low half, whose high one has 64 more.
  int64_t k_of(int64_t i) const { return i / 1024 * (group ? 128 : 64) + i % 1024 / 64 * 4 + i % 4; }

  void clear_padding(std::byte* panel) const {
    for (int64_t i = 0; i < panel_bytes() - data_offset(); ++i) {
      std::byte& at = panel[data_offset() + i];
      if (group && k_of(i) + 64 >= shape.k) at = (at & std::byte{15}) | std::byte{0x80};
      if (k_of(i) >= shape.k) at = group ? std::byte{0x88} : std::byte{0};
    }
  }

  void add_to_sums(std::byte* panel, int64_t i) const {
    const auto number = [](std::byte b) { return static_cast<int32_t>(static_cast<int8_t>(b)); };
    const int64_t column = i % 64 / 4;
    const std::byte at = panel[data_offset() + i];
    const auto weight = [&](std::byte code, int64_t k) {
      return (number(code) - 8) * number(panel[128 + k / group * 16 + column]);
    };
    int32_t sum;
    std::memcpy(&sum, panel + 64 + column * 4, sizeof(sum));
    sum += group ? weight(at & std::byte{15}, k_of(i)) + weight(at >> 4, k_of(i) + 64) : number(at);
    std::memcpy(panel + 64 + column * 4, &sum, sizeof(sum));
  }

  std::vector<float> computed(const Kernel& kernel, int32_t tactic) const {
    std::vector<float> y(static_cast<size_t>(shape.rows * shape.out * (gated ? shape.slots : 1)), NAN);
    const MoeMatmulArgs args{x.data(), ids.data(), weights.data(),    pieces.data(), panels(),
                             y.data(), shape.rows, shape.slots,       shape.experts, n(),
                             shape.k,  group,      Activation::kSilu, tactic};
    run_kernel(kernel, &args, shape.threads);
    return y;
  }

  // One slot after another, as a product of one row.
  std::vector<float> expected(const Kernel& matmul) const {
    std::vector<float> y(static_cast<size_t>(shape.rows * shape.out * (gated ? shape.slots : 1)), 0.0f);
    std::vector<float> product(static_cast<size_t>(shape.out));
    for (int64_t slot = 0; slot < shape.rows * shape.slots; ++slot) {
      std::vector<WeightSlice> parts = pieces;
      for (WeightSlice& part : parts)
        part.data += static_cast<int64_t>(ids[static_cast<size_t>(slot)]) * (part.end - part.begin) * panel_bytes();
      const float* row = x.data() + (gated ? slot / shape.slots : slot) * shape.k;
      const MatmulArgs args{row,
                            parts.data(),
                            static_cast<int64_t>(parts.size()),
                            panels(),
                            nullptr,
                            nullptr,
                            product.data(),
                            1,
                            n(),
                            shape.k,
                            gated ? Activation::kSilu : Activation::kNone,
                            gated,
                            group};
      run_kernel(matmul, &args, 1);
      float* to = y.data() + (gated ? slot : slot / shape.slots) * shape.out;
      for (int64_t i = 0; i < shape.out; ++i) {
        const float value = product[static_cast<size_t>(i)];
        to[i] = gated ? value : to[i] + weights[static_cast<size_t>(slot)] * value;
      }
    }
    return y;
  }
};

bool check(const Kernel& kernel, const Kernel& matmul, const Shape& shape) {
  const std::string taken(kernel.dtype());
  const Case data(shape, kernel.op() == "moe_gate_up", taken.ends_with("a8") ? taken.substr(0, 2) : taken);
  const std::vector<float> want = data.expected(matmul);
  for (int32_t tactic = 0; tactic < (data.gated ? kGateUpTactics : kDownTactics); ++tactic) {
    const std::vector<float> got = data.computed(kernel, tactic);
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::bit_cast<uint32_t>(want[i]) == std::bit_cast<uint32_t>(got[i])) continue;
      std::printf("FAIL %s rows %lld experts %lld k %lld threads %d tactic %d: y[%zu] is %.9g, expected %.9g\n",
                  kernel.name, static_cast<long long>(shape.rows), static_cast<long long>(shape.experts),
                  static_cast<long long>(shape.k), shape.threads, tactic, i, static_cast<double>(got[i]),
                  static_cast<double>(want[i]));
      return false;
    }
  }
  return true;
}

int run() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 4, 1, 1},
      {1, 9, 4, 65, 172, 3, 2},
      {2, 3, 2, 15, 31, 2, 1},
      {5, 5, 5, 16, 33, 1, 1},
      {7, 40, 8, 130, 64, 2, 3},
      {16, 6, 2, 17, 300, 3, 2},
      {17, 6, 2, 17, 300, 2, 1},
      {33, 4, 3, 40, 600, 2, 2},
      {150, 2, 1, 70, 1100, 3, 1},
      {300, 3, 2, 20, 40, 2, 1},
      // groups of 32, 64 and 128, experts of some 4 rows and of some 14: codes as stored, or unpacked
      {9, 6, 3, 18, 258, 1, 1},
      {9, 6, 3, 18, 259, 2, 1},
      {9, 6, 3, 18, 257, 2, 2},
      {24, 5, 3, 35, 171, 2, 2},
      {24, 5, 3, 35, 172, 3, 1},
      {24, 5, 3, 35, 173, 1, 1}};
  int failures = 0, kernels = 0;
  for (const Kernel& kernel : kernel_table()) {
    if (!kernel.op().starts_with("moe_") || !offers_isa(kernel.isa())) continue;
    const std::string name = "matmul." + std::string(kernel.dtype()) + "." + std::string(kernel.isa());
    const Kernel* matmul = find_kernel(name);
    int wrong = 0;
    for (const Shape& shape : shapes) wrong += matmul == nullptr || !check(kernel, *matmul, shape);
    std::printf("%s %s\n", wrong ? "FAIL" : "PASS", kernel.name);
    std::fflush(stdout);
    failures += wrong;
    ++kernels;
  }
  return failures == 0 && kernels > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ingot

int main() { return ingot::run(); }
