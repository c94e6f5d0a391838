// Checks the matrix products of this machine bit for bit against plain loops, without Python: for sanitizers, and for
// emulators of CPUs that are not at hand. Prints one line per kernel; exit status 1 where one differs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "execution/registry.h"
#include "ingot/kernel.h"
#include "isa/cpu_isa.h"
#include "isa/simd_emulated.h"
#include "matmul/activations.h"
#include "matmul/matmul_args.h"
#include "threads/threads.h"

namespace ingot {
namespace {

struct Shape {
  int64_t rows, n, k;
  Activation activation;
  bool gated, bias, residual;
  int threads, pieces;
  int64_t group;  // of w4
};

uint16_t to_bf16(float x) {
  uint16_t bits[16];
  SimdEmulated::store_bf16(bits, SimdEmulated::set1(x));
  return bits[0];
}

float from_bf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// What one AMX instruction (TDPBF16PS) after another adds to a sum: even and odd k apart, 32 k at a time.
float amx_dot(const float* x, const float* weight, int64_t k) {
  float sum = 0;
  for (int64_t start = 0; start < k; start += 32) {
    float part[2] = {0, 0};
    for (int64_t i = start; i < start + 32; ++i) {
      const float a = i < k ? flush(from_bf16(to_bf16(x[i]))) : 0.0f, b = i < k ? flush(weight[i]) : 0.0f;
      part[i % 2] = flush(std::fma(a, b, part[i % 2]));
    }
    sum = flush(sum + flush(part[0] + part[1]));
  }
  return sum;
}

float fma_dot(const float* x, const float* weight, int64_t k) {
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) sum = std::fma(x[i], weight[i], sum);
  return sum;
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a kernel multiplies: the weight's type, and what x is rounded to.
struct Kind {
  std::string_view weight;  // f32, bf16, w8, w4
  bool int8, tiles;

  explicit Kind(const Kernel& kernel)
      : weight(kernel.dtype()), int8(weight.ends_with("a8")), tiles(kernel.isa().starts_with("amx") && !int8) {
    if (int8) weight.remove_suffix(2);
  }
  bool quantised() const { return weight[0] == 'w'; }
};

// A product with its data, packed as the kernels take it.
struct Case {
  Shape shape;
  Kind kind;
  std::vector<float> x, weight, bias, residual;  // weight: of quantised ones the integers
  std::vector<float> scale;                      // of their rows
  std::vector<int8_t> multipliers;               // of w4: [n][groups]
  std::vector<std::vector<std::byte>> storage;   // of the pieces
  std::vector<WeightSlice> pieces;

  int64_t out() const { return shape.gated ? shape.n / 2 : shape.n; }
  int64_t panels() const { return shape.gated ? 2 * ((out() + 15) / 16) : (shape.n + 15) / 16; }
  int64_t groups() const { return round_up(shape.k, 128) / shape.group; }

  Case(const Shape& s, const Kind& of) : shape(s), kind(of) {
    std::mt19937 random(static_cast<uint32_t>(s.rows * 7919 + s.n * 31 + s.k));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) values.push_back(normal(random));
    };
    fill(x, s.rows * s.k);
    fill(weight, s.n * s.k);
    if (s.bias) fill(bias, s.n);
    if (s.residual) fill(residual, s.rows * out());
    if (kind.weight == "bf16")
      for (float& w : weight) w = from_bf16(to_bf16(w));
    if (kind.quantised()) fill(scale, s.n);
    if (kind.weight == "w8")
      for (float& w : weight) w = static_cast<float>(static_cast<int>(random() % 255) - 127);
    if (kind.weight == "w4") {
      for (int64_t i = 0; i < s.n * groups(); ++i)
        multipliers.push_back(static_cast<int8_t>((1 + random() % 15) * (random() % 2 ? 1 : -1)));
      for (int64_t i = 0; i < s.n * s.k; ++i)
        weight[static_cast<size_t>(i)] =
            static_cast<float>(multiplier(i / s.k, i % s.k) * (static_cast<int>(random() % 16) - 8));
    }
    if (s.rows > 2) x[static_cast<size_t>(s.k)] = INFINITY;     // row 1: must not reach another row
    if (s.rows > 4) x[static_cast<size_t>(4 * s.k - 1)] = NAN;  // row 3, at its end
    pack();
  }

  int8_t multiplier(int64_t row, int64_t k) const {
    return multipliers[static_cast<size_t>(row * groups() + k / shape.group)];
  }

  // Row of the weight behind column c of panel p, or -1.
  int64_t weight_row(int64_t p, int64_t c) const {
    const int64_t column = (shape.gated ? p / 2 : p) * 16 + c;
    return column >= out() ? -1 : column + (shape.gated && p % 2 ? out() : 0);
  }

  int64_t panel_bytes() const {
    if (kind.weight == "w8") return 128 + round_up(shape.k, 64) * 16;
    if (kind.weight == "w4") return 128 + round_up(groups() * 16, 64) + round_up(shape.k, 128) * 8;
    return (kind.weight == "bf16" ? round_up(shape.k, 32) * 2 : shape.k * 4) * 16;
  }

  // One number of a panel, where the layouts say.
  void put(std::byte* panel, int64_t c, int64_t k, int64_t row) const {
    const float value = weight[static_cast<size_t>(row * shape.k + k)];
    if (kind.weight == "f32") std::memcpy(panel + k * 64 + c * 4, &value, 4);
    if (kind.weight == "bf16") {
      const uint16_t narrow = to_bf16(value);
      std::memcpy(panel + k / 2 * 64 + c * 4 + k % 2 * 2, &narrow, 2);
    }
    if (kind.quantised()) {
      int32_t sum;
      std::memcpy(&sum, panel + 64 + c * 4, 4);
      sum = (k == 0 ? 0 : sum) + static_cast<int32_t>(value);
      std::memcpy(panel + 64 + c * 4, &sum, 4);
    }
    const int64_t in_tile = k % 64 / 4 * 64 + c * 4 + k % 4;
    if (kind.weight == "w8") panel[128 + k / 64 * 1024 + in_tile] = static_cast<std::byte>(static_cast<int>(value));
    if (kind.weight == "w4") {
      std::byte& both = panel[128 + round_up(groups() * 16, 64) + k / 128 * 1024 + in_tile];
      const auto code = static_cast<std::byte>(static_cast<int>(value) / multiplier(row, k) + 8);
      both = k % 128 < 64 ? (both & std::byte{0xF0}) | code : (both & std::byte{0x0F}) | (code << 4);
    }
  }

  void pack() {
    const int64_t bytes = panel_bytes(), width = shape.gated ? 2 : 1;
    for (int64_t i = 0; i < shape.pieces; ++i) {
      const int64_t units = panels() / width;
      const int64_t begin = units * i / shape.pieces * width, end = units * (i + 1) / shape.pieces * width;
      // padding codes of int4 are 8, whose multiplier is of no consequence
      auto& data = storage.emplace_back(static_cast<size_t>((end - begin) * bytes),
                                        kind.weight == "w4" ? std::byte{0x88} : std::byte{0});
      for (int64_t p = begin; p < end; ++p) {
        std::byte* panel = data.data() + (p - begin) * bytes;
        for (int64_t c = 0; c < 16; ++c) {
          const int64_t row = weight_row(p, c);
          const float s = row >= 0 && kind.quantised() ? scale[static_cast<size_t>(row)] : 0.0f;
          if (kind.quantised()) std::memcpy(panel + c * 4, &s, 4);
          if (kind.weight == "w4")
            for (int64_t g = 0; g < groups(); ++g)
              panel[128 + g * 16 + c] = static_cast<std::byte>(row < 0 ? 1 : multiplier(row, g * shape.group));
          for (int64_t k = 0; row >= 0 && k < shape.k; ++k) put(panel, c, k, row);
        }
      }
      pieces.push_back({begin, end, data.data()});
    }
  }

  // x rounded to int8, and what a step of it is worth.
  float round_row(int64_t row, std::vector<int32_t>& codes) const {
    const float* values = &x[static_cast<size_t>(row * shape.k)];
    float top = 0;
    bool finite = true;
    for (int64_t k = 0; k < shape.k; ++k) {
      top = std::max(top, std::fabs(values[k]));
      finite = finite && std::isfinite(values[k]);
    }
    for (int64_t k = 0; k < shape.k; ++k)
      codes.push_back(finite ? static_cast<int32_t>(std::nearbyint(values[k] * (127.0f / top))) : 0);
    return finite ? top / 127.0f : NAN;
  }

  float product(int64_t row, int64_t column) const {
    const float *w = &weight[static_cast<size_t>(column * shape.k)], *xr = &x[static_cast<size_t>(row * shape.k)];
    if (!kind.int8) {
      const float s = (kind.tiles ? amx_dot : fma_dot)(xr, w, shape.k);
      return kind.quantised() ? s * scale[static_cast<size_t>(column)] : s;
    }
    std::vector<int32_t> codes;
    const float step = round_row(row, codes);
    int32_t s = 0;
    for (int64_t k = 0; k < shape.k; ++k) s += codes[static_cast<size_t>(k)] * static_cast<int32_t>(w[k]);
    return static_cast<float>(s) * (step * scale[static_cast<size_t>(column)]);
  }

  float sum(int64_t row, int64_t column) const {
    const float p = product(row, column);
    return shape.bias ? p + bias[static_cast<size_t>(column)] : p;
  }

  std::vector<float> expected() const {
    std::vector<float> y;
    for (int64_t r = 0; r < shape.rows; ++r)
      for (int64_t c = 0; c < out(); ++c) {
        float v = activate<SimdEmulated>(shape.activation, SimdEmulated::set1(sum(r, c))).lane[0];
        if (shape.gated) v *= sum(r, c + out());
        if (shape.residual) v += residual[y.size()];
        y.push_back(v);
      }
    return y;
  }

  std::vector<float> computed(const Kernel& kernel, int32_t tactic) const {
    std::vector<float> y = residual;  // in place
    y.resize(static_cast<size_t>(shape.rows * out()), NAN);
    const MatmulArgs args{x.data(),
                          pieces.data(),
                          static_cast<int64_t>(pieces.size()),
                          panels(),
                          shape.bias ? bias.data() : nullptr,
                          shape.residual ? y.data() : nullptr,
                          y.data(),
                          shape.rows,
                          shape.n,
                          shape.k,
                          shape.activation,
                          shape.gated,
                          kind.weight == "w4" ? shape.group : 0,
                          tactic};
    struct Run {
      const Kernel* kernel;
      const MatmulArgs* args;
      std::byte* shared;
    };
    const size_t bytes = kernel.scratch ? kernel.scratch(&args) : 0;
    std::byte* shared = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    std::memset(shared, 0xFF, (bytes + 64) / 64 * 64);
    Run run{&kernel, &args, shared};
    const auto job = [](void* context, const Team& team) {
      const Run& todo = *static_cast<Run*>(context);
      Team mine = team;
      mine.shared = todo.shared;
      todo.kernel->run(todo.args, mine);
    };
    ThreadPool::instance().run(shape.threads, job, &run);
    std::free(shared);
    return y;
  }
};

bool check(const Kernel& kernel, const Shape& shape) {
  const Case data(shape, Kind(kernel));
  const std::vector<float> want = data.expected();
  for (int32_t tactic = 0; tactic < kernel.tactics(); ++tactic) {
    const std::vector<float> got = data.computed(kernel, tactic);
    for (size_t i = 0; i < want.size(); ++i) {
      const bool both_nan = std::isnan(want[i]) && std::isnan(got[i]);
      if (std::bit_cast<uint32_t>(want[i]) == std::bit_cast<uint32_t>(got[i]) || both_nan) continue;
      std::printf("FAIL %s rows %lld n %lld k %lld gated %d threads %d tactic %d: y[%zu] is %.9g, expected %.9g\n",
                  kernel.name, static_cast<long long>(shape.rows), static_cast<long long>(shape.n),
                  static_cast<long long>(shape.k), shape.gated, shape.threads, tactic, i, static_cast<double>(got[i]),
                  static_cast<double>(want[i]));
      return false;
    }
  }
  return true;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const int64_t rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 15, 16, 17, 29, 33, 65}, ns[] = {2, 16, 34, 130, 258};
  const int64_t ks[] = {1, 4, 31, 33, 64, 172, 300, 600};
  for (int64_t r : rows)
    for (int64_t i = 0; i < 8; ++i) {
      const auto activation = static_cast<Activation>((r + i) % 5);
      const int threads = 1 + static_cast<int>(i % 3), pieces = 1 + static_cast<int>((r + i) % 3);
      all.push_back({r, ns[(r + i) % 5], ks[i], activation, i % 3 == 0, i % 2 == 0, i % 4 < 2, threads, pieces,
                     32 << (i + r) % 3});
    }
  for (const int64_t r : {1, 3, 9, 21})  // panels follow each other while those before are being used
    all.push_back({r, 258, 1100, Activation::kNone, false, true, true, 1, 2, r % 2 == 0 ? 64 : 128});
  all.push_back({97, 66, 2100, Activation::kSilu, true, true, false, 2, 1, 128});
  for (const int64_t r : {7, 35})  // more elements than a thread prepares by itself
    all.push_back({r, 34, kPrivateRowElements / r + 1, Activation::kSilu, true, true, true, 3, 2, 64});
  return all;
}

int run() {
  int failures = 0, kernels = 0;
  std::printf("this machine offers %s\n", std::string(detect_isa()).c_str());
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op() != "matmul" || !offers_isa(kernel.isa())) continue;
    int wrong = 0, count = 0;
    for (const Shape& shape : shapes()) {
      wrong += !check(kernel, shape);
      ++count;
    }
    std::printf("%s %s: %d of %d products\n", wrong ? "FAIL" : "PASS", kernel.name, count - wrong, count);
    std::fflush(stdout);
    failures += wrong;
    ++kernels;
  }
  return failures == 0 && kernels > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ingot

int main() { return ingot::run(); }
