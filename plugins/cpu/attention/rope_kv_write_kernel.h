// Norms queries and keys where the model does, rotates queries and keys by their positions' angles and stores keys and
// values in the KV cache, in the lines of kv_layout.h; dims of values beyond head_dim are zeros. Either part may be
// missing: queries that attention rotates itself (q is null), and keys and values where it does (no KV heads; a team of
// one, without scratch).
//
//   positions   5 . . 15 | 16 . . . 31 | 32 . . . 47 | 48 49      16 tokens that fill lines of keys are written
//   together,
//               one by one    whole lines, by vectors   by one     of others nothing but their own elements
//
// Floor: a key and a value of a head are 8 * head_dim bytes to read and 2 * head_dim * itemsize to write, both from
// beyond L2. A token alone needs the lines of its key, head_dim / pair of them, of which it writes a sixteenth each:
// they are asked for while the token before it is written.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/kv_layout.h"
#include "attention/rope_kv_write_args.h"
#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "isa/row_absmax.h"

namespace ingot {
namespace {

constexpr int64_t kMaxHeadDim = 512;

// Dims beyond 2 * half are copied. Products and sums round separately, vector or not. y may be x.
template <typename S>
void rotate(const float* x, const float* cos_sin, int64_t half, int64_t dim, bool interleaved, float* y) {
  using V = typename S::V;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[2 * i], second = x[2 * i + 1];
      y[2 * i] = first * cosines[i] - second * sines[i];
      y[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
  } else {
    for (int64_t i = 0; i < half; i += S::kWidth) {
      const int64_t n = half - i;
      const V first = load_lanes<S>(x + i, n), second = load_lanes<S>(x + half + i, n);
      const V cosine = load_lanes<S>(cosines + i, n), sine = load_lanes<S>(sines + i, n);
      store_lanes<S>(y + i, S::sub(S::mul(first, cosine), S::mul(second, sine)), n);
      store_lanes<S>(y + half + i, S::add(S::mul(second, cosine), S::mul(first, sine)), n);
    }
  }
  for (int64_t i = 2 * half; i < dim; ++i) y[i] = x[i];
}

// y = x / rms(x) * weight over each run of x; a weight of null is 1.
template <typename S>
void norm_runs(const float* x, const float* weight, int64_t width, int64_t run, float eps, float* y) {
  for (; width > 0; width -= run, x += run, y += run) {
    const float squares = row_sum<S>(run, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      const typename S::V v = load_lanes<S>(x + i, n);
      return S::mul(v, v);
    });
    const typename S::V factor = S::set1(1.0f / std::sqrt(squares / static_cast<float>(run) + eps));
    for (int64_t i = 0; i < run; i += S::kWidth) {
      const int64_t n = run - i;
      const typename S::V normal = S::mul(load_lanes<S>(x + i, n), factor);
      store_lanes<S>(y + i, weight == nullptr ? normal : S::mul(normal, load_lanes<S>(weight + i, n)), n);
    }
  }
}

template <typename T>
constexpr float kLargestCode = std::is_same_v<T, int8_t> ? 127.0f : 448.0f;

// What a row of x [dim] is multiplied by to become codes, 0 where these are all zeros; and their scale. The rule is
// round_to_codes of plugins/kv_codes.py: a row that is not finite gets the scale NaN, one that is too small for the
// largest code over it gets zeros.
struct Codes {
  float factor = 1.0f, scale = 1.0f;
};
template <typename S, typename T>
Codes codes_of(const float* x, int64_t dim) {
  if constexpr (!kScaled<T>) return {};
  const float top = row_absmax<S>(x, dim), inverse = kLargestCode<T> / top;
  const bool finite = top <= kLargest;
  return {finite && inverse <= kLargest ? inverse : 0.0f, finite ? top / kLargestCode<T> : NAN};
}

template <typename S>
[[gnu::always_inline]] inline void store_codes(int8_t* to, typename S::V v) {
  S::store_i8(to, v);
}
template <typename S>
[[gnu::always_inline]] inline void store_codes(uint8_t* to, typename S::V v) {
  S::store_e4m3(to, v);
}

// kWidth pairs of a line of the cache; `second` is of no consequence where a pair is one number.
template <typename S, typename T>
[[gnu::always_inline]] inline void store_pairs(T* line, typename S::V first, typename S::V second) {
  if constexpr (kPair<T> == 2)
    S::store_bf16_pairs(line, first, second);
  else if constexpr (kScaled<T>)
    store_codes<S>(line, first);
  else
    S::store(line, first);
}

// A head of a block, and a token of it.
template <typename T>
struct KvSlot {
  T *keys, *values;
  int64_t slot;
};

// Where token t goes in the first head.
template <typename T>
KvSlot<T> slot_of(const PagedKv& kv, int64_t t) {
  const int64_t block = kv.block_tables[kv.sequence_of[t] * kv.table_width + kv.positions[t] / kv.block_size];
  return {reinterpret_cast<T*>(kv.keys + block * kv.block_bytes),
          reinterpret_cast<T*>(kv.values + block * kv.block_bytes), kv.positions[t] % kv.block_size};
}

// Asks memory for the lines of token t in all heads.
template <typename S, typename T>
void fetch_slot(const PagedKv& kv, int64_t t) {
  constexpr int64_t kFetched = 64 / sizeof(T);
  KvSlot<T> at = slot_of<T>(kv, t);
  for (int64_t h = 0; h < kv.kv_heads; ++h) {
    const T *keys = key_lines(at.keys, kv.head_dim, at.slot), *values = value_line(at.values, at.slot);
    for (int64_t i = 0; i < kv.head_dim * kKvLanes; i += kFetched) S::prefetch(keys + i);
    for (int64_t d = 0; d < kv.padded_dim; d += kKvLanes) S::prefetch(values + d * kv.block_size);
    at.keys += kv_head_size<T>(kv.head_dim, kv.block_size);
    at.values += kv_head_size<T>(kv.padded_dim, kv.block_size);
  }
}

// x [dim] as the cache holds it, then zeros up to `padded`.
template <typename S, typename T>
void store_row(const float* x, Codes codes, int64_t dim, int64_t padded, T* y) {
  for (int64_t i = 0; i < dim; i += S::kWidth) {
    const typename S::V v = load_lanes<S>(x + i, dim - i);
    if constexpr (kScaled<T>)
      store_codes<S>(y + i, codes.factor > 0.0f ? S::mul(v, S::set1(codes.factor)) : S::zero());
    else
      store_lanes<S>(y + i, v, dim - i);
  }
  for (int64_t i = dim; i < padded; ++i) y[i] = T{};
}

// A key [dim] to its slot, whose pairs are a line apart.
template <typename S, typename T>
void write_key(const float* key, const PagedKv& kv, KvSlot<T> to) {
  const int64_t dim = kv.head_dim;
  const Codes codes = codes_of<S, T>(key, dim);
  alignas(64) T row[kMaxHeadDim];
  store_row<S>(key, codes, dim, dim, row);
  T* line = key_lines(to.keys, dim, to.slot) + to.slot % kKvLanes * kPair<T>;
  for (int64_t d = 0; d < dim; d += kPair<T>, line += kLine<T>) {
    std::memcpy(line, row + d, kPair<T> * sizeof(T));
    asm("" : "+r"(line));  // else the compiler loads vectors, only to take them apart
  }
  if constexpr (kScaled<T>) kv_scales(to.keys, dim, kv.block_size)[to.slot] = codes.scale;
}

// Sixteen keys [16][padded_dim] to the lines that they fill.
template <typename S, typename T>
[[gnu::noinline]] void write_keys(const float* keys, const PagedKv& kv, KvSlot<T> to) {
  using V = typename S::V;
  const int64_t dim = kv.head_dim, stride = kv.padded_dim;
  T* lines = key_lines(to.keys, dim, to.slot);
  for (int64_t token = 0; token < kKvLanes; token += S::kWidth, keys += S::kWidth * stride) {
    alignas(64) float factors[S::kWidth];
    if constexpr (kScaled<T>) {
      float* scales = kv_scales(to.keys, dim, kv.block_size) + to.slot + token;
      for (int64_t i = 0; i < S::kWidth; ++i) {
        const Codes codes = codes_of<S, T>(keys + i * stride, dim);
        factors[i] = codes.factor;
        scales[i] = codes.scale;
      }
    }
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      V dims[S::kWidth];
      S::load_columns(keys + d, stride, dims);
      if constexpr (kScaled<T>) {
        const V factor = S::load(factors);
        for (V& each : dims) each = S::select(S::less(S::zero(), factor), S::mul(each, factor), S::zero());
      }
      T* line = lines + d * kKvLanes + token * kPair<T>;
#pragma GCC unroll 16
      for (int64_t i = 0; i < S::kWidth; i += kPair<T>)
        if (d + i < dim) store_pairs<S>(line + i * kKvLanes, dims[i], dims[i + kPair<T> - 1]);
    }
  }
}

// The values [dim] of a pair of tokens, the second `stride` behind the first, to the line that they fill.
template <typename S, typename T>
void write_values(const float* values, int64_t stride, const PagedKv& kv, KvSlot<T> to) {
  using V = typename S::V;
  const int64_t dim = kv.head_dim;
  const Codes codes = codes_of<S, T>(values, dim);
  T* lines = value_line(to.values, to.slot);
  for (int64_t d = 0; d < kv.padded_dim; d += S::kWidth) {
    T* line = lines + d / kKvLanes * kKvLanes * kv.block_size + d % kKvLanes * kPair<T>;
    V first = S::zero(), second = S::zero();
    if (d < dim && codes.factor > 0.0f) {
      first = load_lanes<S>(values + d, dim - d);
      if constexpr (kScaled<T>) first = S::mul(first, S::set1(codes.factor));
      if constexpr (kPair<T> == 2) second = load_lanes<S>(values + stride + d, dim - d);
    }
    store_pairs<S>(line, first, second);
  }
  if constexpr (kScaled<T>) kv_scales(to.values, kv.padded_dim, kv.block_size)[to.slot] = codes.scale;
}

// The value [dim] of a token of a pair, whose other one may be in use.
template <typename S>
void write_half(const float* value, const PagedKv& kv, KvSlot<uint16_t> to) {
  alignas(64) uint16_t row[kMaxHeadDim];
  store_row<S>(value, {}, kv.head_dim, kv.padded_dim, row);
  uint16_t* line = value_line(to.values, to.slot) + to.slot % 2;
  for (int64_t d = 0; d < kv.padded_dim; d += kKvLanes, line += kKvLanes * kv.block_size)
    for (int64_t i = 0; i < kKvLanes; ++i) line[2 * i] = row[d + i];
}

// Queries of a token, normed and rotated → y [heads * dim].
template <typename S, typename Args>
void rotate_queries(const Args& args, int64_t dim, const float* q, const float* cos_sin, float* y) {
  if (args.q_norm) {
    norm_runs<S>(q, args.q_norm, args.heads * dim, args.q_run, args.norm_eps, y);
    q = y;
  }
  for (int64_t h = 0; h < args.heads; ++h)
    rotate<S>(q + h * dim, cos_sin, args.half, dim, args.interleaved, y + h * dim);
}

// Whether token t is the first of a sequence or of a line of keys, where what a thread writes may begin.
inline bool begins(const PagedKv& kv, int64_t t) {
  return t == 0 || t == kv.tokens || kv.sequence_of[t] != kv.sequence_of[t - 1] || kv.positions[t] % kKvLanes == 0;
}

// Keys, after their norm and rotation, and values of tokens t .. t + count - 1: one, or all of a line of keys.
template <typename S, typename T>
void write_tokens(const RopeKvWriteArgs& args, int64_t t, int64_t count, float* normed) {
  const PagedKv& kv = args.kv;
  const int64_t dim = kv.head_dim, width = args.width(), k_width = kv.kv_heads * dim;
  const auto [keys, values, slot] = slot_of<T>(kv, t);
  const int64_t stride = kv.padded_dim;
  const float *k = args.qkv + t * width + args.heads * dim, *v = args.keys_as_values ? k : k + k_width;
  int64_t from_token = width, from_value = width;  // from a token's keys, or values, to the next one's
  if (args.k_norm) {
    for (int64_t i = 0; i < count; ++i)
      norm_runs<S>(k + i * width, args.k_norm, k_width, args.k_run, args.norm_eps, normed + i * k_width);
    k = normed;
    from_token = k_width;
  }
  if (args.value_norm) {
    float* values_of = normed + (args.k_norm ? kKvLanes * k_width : 0);
    for (int64_t i = 0; i < count; ++i)
      norm_runs<S>(v + i * width, nullptr, k_width, dim, args.norm_eps, values_of + i * k_width);
    v = values_of;
    from_value = k_width;
  }
  for (int64_t h = 0; h < kv.kv_heads; ++h, k += dim, v += dim) {
    alignas(64) float rotated[kKvLanes * kMaxHeadDim];
    for (int64_t i = 0; i < count; ++i) {
      const float* cos_sin = args.cos_sin + (args.cos_sin ? (t + i) * 2 * args.half : 0);
      rotate<S>(k + i * from_token, cos_sin, args.half, dim, args.interleaved, rotated + i * stride);
    }
    KvSlot<T> to{keys + h * kv_head_size<T>(dim, kv.block_size), values + h * kv_head_size<T>(stride, kv.block_size),
                 slot};
    if (count == 1) {
      if constexpr (kPair<T> == 2)
        write_half<S>(v, kv, to);
      else
        write_values<S>(v, from_value, kv, to);
      write_key<S>(rotated, kv, to);
      continue;
    }
    write_keys<S>(rotated, kv, to);
    for (int64_t i = 0; i < count; i += kPair<T>, to.slot += kPair<T>)
      write_values<S>(v + i * from_value, from_value, kv, to);
  }
}

template <typename S, typename T>
void rope_kv_write(const RopeKvWriteArgs& args, const Team& team) {
  const PagedKv& kv = args.kv;
  const int64_t dim = kv.head_dim, width = args.width(), q_width = args.heads * dim;
  Team::Range mine = team.share(kv.tokens);
  if (args.q)
    for (int64_t t = mine.begin; t < mine.end; ++t)
      rotate_queries<S>(args, dim, args.qkv + t * width, args.cos_sin + (args.cos_sin ? t * 2 * args.half : 0),
                        args.q + t * q_width);
  if (kv.kv_heads == 0) return;
  const size_t rows = (args.k_norm ? 1 : 0) + (args.value_norm ? 1 : 0);  // a line's keys, and its values
  const size_t bytes = rows * static_cast<size_t>(kKvLanes * kv.kv_heads * dim) * sizeof(float);
  float* normed = rows > 0 ? reinterpret_cast<float*>(team.scratch(bytes)) : nullptr;
  while (!begins(kv, mine.begin)) ++mine.begin;
  while (!begins(kv, mine.end)) ++mine.end;
  for (int64_t t = mine.begin, count; t < mine.end; t += count) {
    const int64_t last = t + kKvLanes - 1;
    const bool whole = kv.positions[t] % kKvLanes == 0 && last < kv.tokens && kv.sequence_of[last] == kv.sequence_of[t];
    count = whole ? kKvLanes : 1;
    if (!whole && t + 1 < mine.end) fetch_slot<S, T>(kv, t + 1);
    write_tokens<S, T>(args, t, count, normed);
  }
}

}  // namespace
}  // namespace ingot
