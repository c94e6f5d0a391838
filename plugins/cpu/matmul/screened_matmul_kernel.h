// Rows of logits of which only the best is wanted: the algorithm of plugins/ops/screened_matmul.py, where its proof is.
//
//   estimates | likeliest token of my share | candidates of my share, all else -inf | every n-th candidate | product
//
// Threads wait for each other at each |. The product with all codes comes where that does not decide every row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "matmul/matmul_int8_kernel.h"
#include "matmul/screened_matmul_args.h"

namespace ingot {
namespace {

constexpr float kScreenStep = 17, kScreenTiny = 0x1p-80f;
constexpr double kScreenSpread = 9.5, kScreenSlack = 0x1p-13;
constexpr int64_t kScreenMost = 8;

// What one thread has found in a row.
struct alignas(64) ScreenFound {
  float value;  // of the likeliest token
  int32_t token;
  int64_t candidates;
  bool finite;
};

// Team::shared of a screen: what each thread has found between two barriers, and lists of candidates, those of a thread
// where its share of the vocabulary begins.
struct ScreenSpace {
  enum Find { kLikely, kListed, kExact, kFinds };
  std::byte* data;
  int64_t rows, n;

  size_t found_bytes() const { return static_cast<size_t>(kFinds * rows * kScreenThreads) * sizeof(ScreenFound); }
  size_t bytes() const { return found_bytes() + static_cast<size_t>(rows * n) * sizeof(int32_t); }
  ScreenFound* found(Find what, int64_t row) const {
    return reinterpret_cast<ScreenFound*>(data) + (what * rows + row) * kScreenThreads;
  }
  int32_t* list(int64_t row, int64_t token) const {
    return reinterpret_cast<int32_t*>(data + found_bytes()) + row * n + token;
  }
};

inline size_t product_scratch(const ProductCall& call, int64_t rows) {
  MatmulArgs args = call.args;
  args.rows = rows;
  return call.scratch == nullptr ? 0 : call.scratch(&args);
}

inline size_t screened_matmul_scratch(const void* args) {
  const auto& screened = *static_cast<const ScreenedMatmulArgs*>(args);
  const int64_t few = std::min(screened.rows, kScreenRows);
  return std::max({product_scratch(screened.product, screened.rows), product_scratch(screened.estimate, few),
                   ScreenSpace{nullptr, few, screened.n}.bytes()});
}

// A row of activations as the product takes it.
struct ScreenRow {
  const int8_t* codes;
  float scale;
  float known, highest;  // D and D + B
};

template <typename I>
ScreenRow screen_row(const ScreenedMatmulArgs& args, const float* x, int8_t* codes) {
  const int64_t padded = ceil_div(args.k, kTileK) * kTileK;
  const float scale = round_row<I>(x, args.k, padded, [codes](int64_t k) { return codes + k; });
  int32_t size = 0, known = 0;
  int64_t squares = 0;
  for (int64_t k = 0; k < args.k; ++k) {
    const int32_t code = codes[k];
    size += std::abs(code);
    known += static_cast<int32_t>(kScreenStep - args.dither[k]) * code;
    squares += code * code;
  }
  const double reach =
      std::min(kScreenSpread * std::sqrt(24.0 * static_cast<double>(squares)), 8.0 * size) + kScreenSlack * size;
  return {codes, scale, static_cast<float>(known), static_cast<float>(known + reach)};
}

// The bits of the full product's logit.
inline float exact_logit(const ScreenedMatmulArgs& args, const ScreenRow& row, int64_t token) {
  const std::byte* start = args.table + token * args.row_bytes;
  const auto* codes = reinterpret_cast<const int8_t*>(start + sizeof(float));
  float scale;
  std::memcpy(&scale, start, sizeof(scale));
  int32_t sum = 0;
  for (int64_t k = 0; k < args.k; ++k) sum += int32_t{codes[k]} * row.codes[k];
  return static_cast<float>(sum) * (row.scale * scale);
}

// Calls f(token, lanes, v) for every vector v of 17 estimate + scale * offset of a row's tokens.
template <typename I, typename F>
void each_estimate(const ScreenedMatmulArgs& args, int64_t row, float row_scale, float offset, Team::Range tokens,
                   F f) {
  using V = typename I::V;
  const V step = I::set1(kScreenStep), scale = I::set1(row_scale), add = I::set1(offset);
  const float* const estimates = args.y + row * args.n;
  for (int64_t token = tokens.begin; token < tokens.end; token += I::kWidth) {
    const int64_t left = tokens.end - token;
    const V of_token = I::mul(scale, load_lanes<I>(args.scales + token, left));
    f(token, std::min<int64_t>(left, I::kWidth),
      I::add(I::mul(step, load_lanes<I>(estimates + token, left)), I::mul(of_token, add)));
  }
}

template <typename I>
ScreenFound likeliest(const ScreenedMatmulArgs& args, int64_t r, const ScreenRow& row, Team::Range tokens) {
  using V = typename I::V;
  ScreenFound found{-std::numeric_limits<float>::infinity(), -1, 0, true};
  V strange = I::zero();  // NaN as soon as something is not finite
  alignas(64) float lanes[I::kWidth];
  each_estimate<I>(args, r, row.scale, row.known, tokens, [&](int64_t token, int64_t left, V v) {
    strange = I::add(strange, I::mul(v, I::zero()));
    const V inside = I::select(I::first_lanes(left), v, I::set1(-std::numeric_limits<float>::infinity()));
    if (!(I::reduce_max(inside) > found.value)) return;
    I::store(lanes, inside);
    const float* top = std::max_element(lanes, lanes + left);
    found.value = *top;
    found.token = static_cast<int32_t>(token + (top - lanes));
  });
  found.finite = I::reduce_add(strange) == 0;
  return found;
}

// Those of some tokens that reach `least`, to `to`; how many they are.
template <typename I>
int64_t list_candidates(const ScreenedMatmulArgs& args, int64_t r, const ScreenRow& row, float least,
                        Team::Range tokens, int32_t* to) {
  using V = typename I::V;
  int64_t count = 0;
  alignas(64) float lanes[I::kWidth];
  each_estimate<I>(args, r, row.scale, row.highest, tokens, [&](int64_t token, int64_t left, V v) {
    const V inside = I::select(I::first_lanes(left), v, I::set1(-std::numeric_limits<float>::infinity()));
    if (!(I::reduce_max(inside) >= least)) return;
    I::store(lanes, v);
    for (int64_t i = 0; i < left; ++i)
      if (lanes[i] >= least) to[count++] = static_cast<int32_t>(token + i);
  });
  return count;
}

bool likelier(float value, int32_t token, const ScreenFound& than) {
  return than.token < 0 || value > than.value || (value == than.value && token < than.token);
}

// Of all threads together; no token where one of them found something that is not finite.
ScreenFound together(const ScreenFound* found, int threads) {
  ScreenFound all{0, -1, 0, true};
  for (const ScreenFound* each = found; each < found + threads; ++each) {
    if (each->token >= 0 && likelier(each->value, each->token, all)) {
      all.value = each->value;
      all.token = each->token;
    }
    all.candidates += each->candidates;
    all.finite = all.finite && each->finite;
  }
  if (!all.finite) all.token = -1;
  return all;
}

// The logits of every n-th candidate of all threads' lists, to their places; whether they are finite.
template <typename I>
bool put_logits(const ScreenedMatmulArgs& args, const ScreenRow& row, const ScreenSpace& space, int64_t r,
                const Team& team) {
  bool finite = true;
  int64_t number = team.index;  // of the next one, counted from the list at hand
  for (int thread = 0; thread < team.count; ++thread) {
    const int64_t count = space.found(ScreenSpace::kListed, r)[thread].candidates;
    const int32_t* list = space.list(r, args.n * thread / team.count);
    for (; number < count; number += team.count) {
      const float logit = exact_logit(args, row, list[number]);
      finite = finite && std::isfinite(logit);
      args.y[r * args.n + list[number]] = logit;
    }
    number -= count;
  }
  return finite;
}

// From estimates in y to what the op may leave there; false where it must be all logits after all.
template <typename I>
bool screen(const ScreenedMatmulArgs& args, const Team& team) {
  using Space = ScreenSpace;
  const Space space{team.shared, args.rows, args.n};
  const int64_t padded = ceil_div(args.k, kTileK) * kTileK;
  auto* const codes = reinterpret_cast<int8_t*>(team.rows_scratch(static_cast<size_t>(args.rows * padded)));
  const Team::Range tokens = team.share(args.n);
  ScreenRow rows[kScreenRows];
  for (int64_t r = 0; r < args.rows; ++r) {
    rows[r] = screen_row<I>(args, args.x + r * args.k, codes + r * padded);
    space.found(Space::kLikely, r)[team.index] = likeliest<I>(args, r, rows[r], tokens);
  }
  team.barrier();
  for (int64_t r = 0; r < args.rows; ++r) {
    ScreenFound likely = together(space.found(Space::kLikely, r), team.count);
    if (likely.token >= 0) {
      const float least = exact_logit(args, rows[r], likely.token) - kScreenTiny;
      likely.candidates = list_candidates<I>(args, r, rows[r], least, tokens, space.list(r, tokens.begin));
    }
    space.found(Space::kListed, r)[team.index] = likely;
    std::fill(args.y + r * args.n + tokens.begin, args.y + r * args.n + tokens.end,
              -std::numeric_limits<float>::infinity());
  }
  team.barrier();
  bool few = true;
  for (int64_t r = 0; r < args.rows; ++r) {
    const ScreenFound all = together(space.found(Space::kListed, r), team.count);
    few = few && all.token >= 0 && all.candidates * kScreenMost <= args.n;
  }
  for (int64_t r = 0; few && r < args.rows; ++r)
    space.found(Space::kExact, r)[team.index] = {0, -1, 0, put_logits<I>(args, rows[r], space, r, team)};
  team.barrier();
  for (int64_t r = 0; few && r < args.rows; ++r) few = together(space.found(Space::kExact, r), team.count).finite;
  return few;
}

void run_product(const ProductCall& call, const ScreenedMatmulArgs& args, const Team& team, int32_t tactic) {
  MatmulArgs product = call.args;
  product.x = args.x;
  product.rows = args.rows;
  product.tactic = tactic;
  call.run(&product, team);
}

template <typename I>
void screened_matmul(const ScreenedMatmulArgs& args, const Team& team) {
  const auto whole = [](int32_t row) { return row != 0; };
  if (args.rows <= kScreenRows && std::none_of(args.whole_rows, args.whole_rows + args.rows, whole)) {
    run_product(args.estimate, args, team, 0);
    team.barrier();
    if (screen<I>(args, team)) return;
    team.barrier();  // the product writes over what the threads have found
  }
  run_product(args.product, args, team, args.tactic);
}

}  // namespace
}  // namespace ingot
