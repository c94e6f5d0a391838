// Checks the matrix products of this machine bit for bit against plain loops, without Python: for sanitizers, and for
// emulators of CPUs that are not at hand. Prints one line per kernel; exit status 1 where one differs.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "activations.h"
#include "cpu_isa.h"
#include "ingot/kernel.h"
#include "registry.h"
#include "simd_emulated.h"
#include "threads.h"

namespace ingot {
namespace {

struct Shape {
  int64_t rows, n, k;
  Activation activation;
  bool gated, bias, residual;
  int threads, pieces;
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

// A product with its data, packed as the kernels take it.
struct Case {
  Shape shape;
  bool bf16, amx;
  std::vector<float> x, weight, bias, residual;
  std::vector<std::vector<std::byte>> storage;  // of the pieces
  std::vector<Piece> pieces;

  int64_t out() const { return shape.gated ? shape.n / 2 : shape.n; }
  int64_t panels() const { return shape.gated ? 2 * ((out() + 15) / 16) : (shape.n + 15) / 16; }

  Case(const Shape& s, bool is_bf16, bool is_amx) : shape(s), bf16(is_bf16), amx(is_amx) {
    std::mt19937 random(static_cast<uint32_t>(s.rows * 7919 + s.n * 31 + s.k));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) values.push_back(normal(random));
    };
    fill(x, s.rows * s.k);
    fill(weight, s.n * s.k);
    if (s.bias) fill(bias, s.n);
    if (s.residual) fill(residual, s.rows * out());
    if (bf16)
      for (float& w : weight) w = from_bf16(to_bf16(w));
    if (s.rows > 2) x[static_cast<size_t>(s.k)] = INFINITY;  // row 1: must not reach another row
    pack();
  }

  // Row of the weight behind column c of panel p, or -1.
  int64_t weight_row(int64_t p, int64_t c) const {
    const int64_t column = (shape.gated ? p / 2 : p) * 16 + c;
    return column >= out() ? -1 : column + (shape.gated && p % 2 ? out() : 0);
  }

  void pack() {
    const int64_t lines = bf16 ? (shape.k + 31) / 32 * 16 : shape.k, width = shape.gated ? 2 : 1;
    for (int64_t i = 0; i < shape.pieces; ++i) {
      const int64_t units = panels() / width;
      const int64_t begin = units * i / shape.pieces * width, end = units * (i + 1) / shape.pieces * width;
      auto& data = storage.emplace_back(static_cast<size_t>((end - begin) * lines * 64));
      for (int64_t p = begin; p < end; ++p)
        for (int64_t k = 0; k < shape.k; ++k)
          for (int64_t c = 0; c < 16; ++c) {
            const int64_t row = weight_row(p, c);
            const float value = row < 0 ? 0.0f : weight[static_cast<size_t>(row * shape.k + k)];
            std::byte* panel = data.data() + (p - begin) * lines * 64;
            const uint16_t narrow = to_bf16(value);
            if (bf16)
              std::memcpy(panel + k / 2 * 64 + c * 4 + k % 2 * 2, &narrow, 2);
            else
              std::memcpy(panel + k * 64 + c * 4, &value, 4);
          }
      pieces.push_back({begin, end, data.data()});
    }
  }

  float sum(int64_t row, int64_t column) const {
    const auto dot = amx ? amx_dot : fma_dot;
    const float* w = &weight[static_cast<size_t>(column * shape.k)];
    const float s = dot(&x[static_cast<size_t>(row * shape.k)], w, shape.k);
    return shape.bias ? s + bias[static_cast<size_t>(column)] : s;
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

  std::vector<float> computed(const Kernel& kernel) const {
    std::vector<float> y = residual;  // in place
    y.resize(static_cast<size_t>(shape.rows * out()), NAN);
    const MatmulArgs args{x.data(), pieces.data(), static_cast<int64_t>(pieces.size()), panels(),
                          shape.bias ? bias.data() : nullptr, shape.residual ? y.data() : nullptr, y.data(),
                          shape.rows, shape.n, shape.k, shape.activation, shape.gated};
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
  const Case data(shape, kernel.dtype() == "bf16", kernel.isa().starts_with("amx"));
  const std::vector<float> want = data.expected(), got = data.computed(kernel);
  for (size_t i = 0; i < want.size(); ++i) {
    const bool both_nan = std::isnan(want[i]) && std::isnan(got[i]);
    if (std::bit_cast<uint32_t>(want[i]) == std::bit_cast<uint32_t>(got[i]) || both_nan) continue;
    std::printf("FAIL %s rows %lld n %lld k %lld gated %d threads %d: y[%zu] is %.9g, expected %.9g\n", kernel.name,
                static_cast<long long>(shape.rows), static_cast<long long>(shape.n), static_cast<long long>(shape.k),
                shape.gated, shape.threads, i, static_cast<double>(got[i]), static_cast<double>(want[i]));
    return false;
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
      all.push_back({r, ns[(r + i) % 5], ks[i], activation, i % 3 == 0, i % 2 == 0, i % 4 < 2, threads, pieces});
    }
  return all;
}

int run() {
  int failures = 0, kernels = 0;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op() != "matmul" || !isa_includes(detect_isa(), kernel.isa())) continue;
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
