// linear_attention, token by token for prompts and decode alike: one order of operations for every element of the
// state, whatever stands in the step. An item is a head, or where there are few, some columns of its state, which
// depend on no other columns.
//
// Floors: one token reads and writes the state, 8 bytes an element. In a run of tokens the state stays in the L1 cache,
// and each token takes four multiplications of an element: change, output, decay, and the next token's key.
#pragma once

#include <algorithm>
#include <cmath>

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "isa/simd_math.h"
#include "matmul/activations.h"
#include "recurrent/linear_attention_args.h"

namespace ingot {
namespace {

constexpr int64_t kStateColumns = 64;  // of an item, at least
// Rows of a state lie a power of two apart, mostly, so that they share few sets of the L1 cache. A run of tokens thus
// copies these columns side by side: 16 KiB with key_dim 128.
constexpr int64_t kRunColumns = 32;
constexpr int64_t kRunTokens = 16;  // keys, queries and decays of so many are made at once, for all columns of an item

template <typename S>
[[gnu::always_inline]] inline float first_lane(typename S::V v) {
  alignas(64) float lanes[S::kWidth];
  S::store(lanes, v);
  return lanes[0];
}

template <typename S>
[[gnu::always_inline]] inline float exp_of(float x) {
  return first_lane<S>(exp<S>(S::set1(x)));
}

// log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x|; log(1 + z) = 2 artanh(s), s = z / (2 + z) <= 1/3, by its series in
// double: no library's logarithm, whose last bits may differ between machines.
template <typename S>
[[gnu::always_inline]] inline float softplus(float x) {
  const double z = exp_of<S>(-std::fabs(x)), s = z / (2 + z), square = s * s;
  double sum = 0;
  for (int i = 19; i >= 1; i -= 2) sum = sum * square + 1.0 / i;
  return static_cast<float>((x > 0 ? x : 0) + 2 * s * sum);
}

// The same of many at once, its series in float32.
template <typename S>
[[gnu::always_inline]] inline typename S::V softplus_lanes(typename S::V x) {
  using V = typename S::V;
  const V z = exp<S>(S::sub(S::zero(), S::abs(x))), s = S::div(z, S::add(S::set1(2.0f), z)), square = S::mul(s, s);
  V sum = S::set1(1.0f / 15);
#pragma GCC unroll 7
  for (int i = 13; i >= 1; i -= 2) sum = S::fma(sum, square, S::set1(1.0f / static_cast<float>(i)));
  return S::fma(S::add(s, s), sum, S::max(S::zero(), x));
}

// exp(rate * step) of each dim of a key → decays
template <typename S>
void decay_row(const float* dt, float* decays, int64_t n, float rate, float least, float most) {
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const typename S::V steps = softplus_lanes<S>(load_lanes<S>(dt + i, n - i));
    const typename S::V within = S::min(S::set1(most), S::max(S::set1(least), steps));
    store_lanes<S>(decays + i, exp<S>(S::mul(S::set1(rate), within)), n - i);
  }
}

// from * factor → to, factor = scale / sqrt(sum of squares + eps), or scale where eps is 0
template <typename S>
void scale_row(const float* from, float* to, int64_t n, float eps, float scale) {
  if (eps > 0) {
    const float squares = row_sum<S>(n, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
      const typename S::V v = load_lanes<S>(from + i, lanes);
      return S::mul(v, v);
    });
    scale = scale / std::sqrt(squares + eps);
  }
  for (int64_t i = 0; i < n; i += S::kWidth)
    store_lanes<S>(to + i, S::mul(load_lanes<S>(from + i, n - i), S::set1(scale)), n - i);
}

// Whether what the state holds of a token's key takes part in the token's change, and whether each dim of a key has a
// decay of its own.
enum class Rule { kAdd, kDelta, kDeltaByDim };

// Where a head's parts lie in a token's row of x.
struct HeadPlaces {
  int64_t q, k, v, cols;

  HeadPlaces(const LinearAttentionArgs& args, int64_t head) {
    const int64_t keys = args.key_heads * args.key_dim, values = args.heads * args.value_dim;
    const int64_t key_head = head / (args.heads / args.key_heads) * args.key_dim;
    q = key_head + (args.values_first ? values + keys : 0);
    k = key_head + (args.values_first ? values : keys);
    v = head * args.value_dim + (args.values_first ? 0 : 2 * keys);
    cols = 2 * keys + values;
  }
};

// Up to kRunTokens tokens, as a head takes them.
struct HeadTokens {
  float *k, *q, *decays;     // [tokens, key_dim]
  float *steps, *strengths;  // [tokens]; steps not with kDeltaByDim, strengths not with kAdd

  static int64_t floats(int64_t key_dim) { return kRunTokens * (3 * key_dim + 2); }

  HeadTokens(float* memory, int64_t key_dim)
      : k(memory),
        q(k + kRunTokens * key_dim),
        decays(q + kRunTokens * key_dim),
        steps(decays + kRunTokens * key_dim),
        strengths(steps + kRunTokens) {}

  template <typename S, Rule kRule>
  void prepare(const LinearAttentionArgs& args, const HeadPlaces& places, int64_t head, int64_t first, int64_t count) {
    const float rate = -exp_of<S>(args.a_log[head]);
    const int64_t dims = args.key_dim;
    for (int64_t t = 0; t < count; ++t) {
      const float* x = args.x + (first + t) * places.cols;
      const int64_t at = (first + t) * args.heads + head;
      scale_row<S>(x + places.q, q + t * dims, dims, args.l2_eps, args.scale);
      scale_row<S>(x + places.k, k + t * dims, dims, args.l2_eps, 1.0f);
      if constexpr (kRule == Rule::kDeltaByDim) {
        decay_row<S>(args.dt + at * dims, decays + t * dims, dims, rate, args.dt_min, args.dt_max);
      } else {
        steps[t] = std::min(std::max(softplus<S>(args.dt[at]), args.dt_min), args.dt_max);
        std::fill_n(decays + t * dims, dims, exp_of<S>(rate * steps[t]));
      }
      if constexpr (kRule != Rule::kAdd)
        strengths[t] = first_lane<S>(over_logistic<S>(S::set1(1.0f), S::set1(args.beta[at])));
    }
  }

  // What token t adds to the state along its key, of which the state holds `known`.
  template <typename S, Rule kRule>
  [[gnu::always_inline]] typename S::V change(int64_t t, typename S::V value, typename S::V known) const {
    if constexpr (kRule == Rule::kAdd)
      return S::mul(S::set1(steps[t]), value);
    else
      return S::mul(S::set1(strengths[t]), S::sub(value, known));
  }
};

// What a thread computes at a time: some tokens and columns of a head.
struct StateRun {
  HeadTokens tokens;
  int64_t count, key_dim, columns;
  const float* from;  // the state before, rows of `stride` floats; null for zeros
  float* to;          // the state after
  int64_t stride;
  const float* v;  // of the first token; those of the next are v_stride further on
  int64_t v_stride;
  float* y;
  int64_t y_stride;
  const float* skip;  // of the head, or null
};

// kColumns columns, of which the first n exist.
template <typename S, int64_t kColumns>
struct Columns {
  using V = typename S::V;
  static constexpr int kVectors = kColumns / S::kWidth;
  int64_t n;

  [[gnu::always_inline]] V load(const float* p, int j) const {
    return load_lanes<S>(p + j * S::kWidth, std::max<int64_t>(n - j * S::kWidth, 0));
  }
  [[gnu::always_inline]] void store(float* p, V value, int j) const {
    store_lanes<S>(p + j * S::kWidth, value, std::max<int64_t>(n - j * S::kWidth, 0));
  }
  [[gnu::always_inline]] void store_y(const StateRun& run, int64_t t, const V* out) const {
    for (int j = 0; j < kVectors; ++j) {
      V y = out[j];
      if (run.skip != nullptr) y = S::fma(S::set1(*run.skip), load(run.v + t * run.v_stride, j), y);
      store(run.y + t * run.y_stride, y, j);
    }
  }
};

// One token, by two passes over the state where it lies.
template <typename S, Rule kRule, bool kWhole>
void one_token(const StateRun& run) {
  using V = typename S::V;
  const Columns<S, kStateColumns> columns{kWhole ? kStateColumns : run.columns};
  constexpr int kVectors = columns.kVectors;
  const float *k = run.tokens.k, *q = run.tokens.q, *decays = run.tokens.decays;
  V known[kVectors], out[kVectors], change[kVectors];
  for (int j = 0; j < kVectors; ++j) known[j] = out[j] = S::zero();
  for (int64_t i = 0; i < run.key_dim; ++i) {
    const V key = S::set1(k[i]), decay = S::set1(decays[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V state = run.from == nullptr ? S::zero() : S::mul(columns.load(run.from + i * run.stride, j), decay);
      known[j] = S::fma(state, key, known[j]);
      columns.store(run.to + i * run.stride, state, j);
    }
  }
  for (int j = 0; j < kVectors; ++j) change[j] = run.tokens.change<S, kRule>(0, columns.load(run.v, j), known[j]);
  for (int64_t i = 0; i < run.key_dim; ++i) {
    const V key = S::set1(k[i]), query = S::set1(q[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V state = S::fma(key, change[j], columns.load(run.to + i * run.stride, j));
      out[j] = S::fma(query, state, out[j]);
      columns.store(run.to + i * run.stride, state, j);
    }
  }
  columns.store_y(run, 0, out);
}

// One pass over the state of a run: token t's change and output, and what the state then holds of the next token's key.
// The pass of the last token leaves the state in run.to.
template <typename S, Rule kRule, bool kLast>
[[gnu::noinline]] void pass(const StateRun& run, int64_t t, float* state, const typename S::V* change,
                            typename S::V* known) {
  using V = typename S::V;
  const Columns<S, kRunColumns> columns{run.columns};
  constexpr int kVectors = columns.kVectors;
  const float *k = run.tokens.k + t * run.key_dim, *q = run.tokens.q + t * run.key_dim;
  const float *next_k = k + run.key_dim, *next_decays = run.tokens.decays + (t + 1) * run.key_dim;
  V out[kVectors], held[kVectors], by[kVectors];
  for (int j = 0; j < kVectors; ++j) out[j] = held[j] = S::zero(), by[j] = change[j];
  V decay = kLast || kRule == Rule::kDeltaByDim ? S::zero() : S::set1(next_decays[0]);
  for (int64_t i = 0; i < run.key_dim; ++i) {
    const V key = S::set1(k[i]), query = S::set1(q[i]), next_key = kLast ? S::zero() : S::set1(next_k[i]);
    if constexpr (!kLast && kRule == Rule::kDeltaByDim) decay = S::set1(next_decays[i]);
    float* row = state + i * kRunColumns;
    for (int j = 0; j < kVectors; ++j) {
      V now = S::fma(key, by[j], S::load(row + j * S::kWidth));
      out[j] = S::fma(query, now, out[j]);
      if constexpr (kLast) {
        columns.store(run.to + i * run.stride, now, j);
      } else {
        now = S::mul(now, decay);
        if constexpr (kRule != Rule::kAdd) held[j] = S::fma(now, next_key, held[j]);
        S::store(row + j * S::kWidth, now);
      }
    }
  }
  for (int j = 0; j < kVectors; ++j) known[j] = held[j];
  columns.store_y(run, t, out);
}

// A run of tokens. state: [key_dim, kRunColumns]
template <typename S, Rule kRule>
void several_tokens(const StateRun& run, float* state) {
  using V = typename S::V;
  const Columns<S, kRunColumns> columns{run.columns};
  constexpr int kVectors = columns.kVectors;
  V known[kVectors], change[kVectors];
  for (int j = 0; j < kVectors; ++j) known[j] = S::zero();
  for (int64_t i = 0; i < run.key_dim; ++i) {
    const V key = S::set1(run.tokens.k[i]), decay = S::set1(run.tokens.decays[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V now = run.from == nullptr ? S::zero() : S::mul(columns.load(run.from + i * run.stride, j), decay);
      known[j] = S::fma(now, key, known[j]);
      S::store(state + i * kRunColumns + j * S::kWidth, now);
    }
  }
  for (int64_t t = 0; t < run.count; ++t) {
    const float* v = run.v + t * run.v_stride;
    for (int j = 0; j < kVectors; ++j) change[j] = run.tokens.change<S, kRule>(t, columns.load(v, j), known[j]);
    const auto next = t + 1 < run.count ? pass<S, kRule, false> : pass<S, kRule, true>;
    next(run, t, state, change, known);
  }
}

// Columns [column, end) of a head, for all tokens of a sequence.
template <typename S, Rule kRule>
void head_columns(const LinearAttentionArgs& args, int64_t sequence, int64_t head, int64_t column, int64_t end,
                  float* memory) {
  const HeadPlaces places(args, head);
  HeadTokens tokens(memory, args.key_dim);
  float* const state = memory + HeadTokens::floats(args.key_dim);
  const int64_t place = head * args.key_dim * args.value_dim, y_stride = args.heads * args.value_dim;
  args.kv.for_each_run(sequence, [&](int64_t begin, int64_t stop, const float* before, float* after) {
    for (int64_t first = begin; first < stop; first += kRunTokens, before = after) {
      const int64_t count = std::min(stop - first, kRunTokens);
      tokens.prepare<S, kRule>(args, places, head, first, count);
      const int64_t width = count == 1 ? kStateColumns : kRunColumns;
      for (int64_t at = column; at < end; at += width) {
        const StateRun run{.tokens = tokens,
                           .count = count,
                           .key_dim = args.key_dim,
                           .columns = std::min(end - at, width),
                           .from = before == nullptr ? nullptr : before + place + at,
                           .to = after + place + at,
                           .stride = args.value_dim,
                           .v = args.x + first * places.cols + places.v + at,
                           .v_stride = places.cols,
                           .y = args.y + first * y_stride + head * args.value_dim + at,
                           .y_stride = y_stride,
                           .skip = args.skip == nullptr ? nullptr : args.skip + head};
        if (count > 1)
          several_tokens<S, kRule>(run, state);
        else if (run.columns == kStateColumns)
          one_token<S, kRule, true>(run);
        else
          one_token<S, kRule, false>(run);
      }
    }
  });
}

template <typename S>
void linear_attention(const LinearAttentionArgs& args, const Team& team) {
  const int64_t floats = HeadTokens::floats(args.key_dim) + args.key_dim * kRunColumns;
  auto* memory = reinterpret_cast<float*>(team.scratch(static_cast<size_t>(floats) * sizeof(float)));
  const auto run = args.beta == nullptr ? head_columns<S, Rule::kAdd>
                   : args.by_dim        ? head_columns<S, Rule::kDeltaByDim>
                                        : head_columns<S, Rule::kDelta>;
  // Every item makes keys and decays of its own, so that whole heads are items where there are enough for all threads.
  const int64_t heads = args.kv.sequences * args.heads;
  const int64_t width = heads >= 4 * team.count ? args.value_dim : kStateColumns;
  const int64_t parts = (args.value_dim + width - 1) / width;
  const Team::Range items = team.share(heads * parts);
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t column = item % parts * width, head = item / parts % args.heads;
    run(args, item / parts / args.heads, head, column, std::min(column + width, args.value_dim), memory);
  }
}

}  // namespace
}  // namespace ingot
