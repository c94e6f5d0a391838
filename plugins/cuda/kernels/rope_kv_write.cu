// Norms queries and keys where the model does, rotates them, and writes keys and values into the paged cache.
//
//   K block [kv_heads][tokens_per_block][head_dim]      V block [kv_heads][tokens_per_block][padded_dim]
//
// A thread takes eight dims of a head of q, k or v: four and the four that they are rotated with, or eight in a row. Of
// heads of more than 256 dims it takes several such eights.
// Heads of other sizes, or whose rotated dims are no multiple of eight, go dim by dim, with a warp for each. Grid:
// (tokens, groups of kHeadsPerBlock heads)
#include "kv_cache.cuh"

constexpr int kRopeThreads = 128;
constexpr int kRopeWarps = kRopeThreads / kWarp;
constexpr int kHeadLanes = kPaddedDim <= 16    ? 2
                           : kPaddedDim <= 32  ? 4
                           : kPaddedDim <= 64  ? 8
                           : kPaddedDim <= 128 ? 16
                                               : 32;
constexpr int kHeadsPerBlock = kRopeThreads / kHeadLanes;
constexpr int kHeadParts = (kPaddedDim / 8 + kHeadLanes - 1) / kHeadLanes;  // eights of a thread

struct PagedCache {
  Stored* keys;       // of this layer: [blocks][kv_heads][kTokens][head_dim]
  Stored* values;     // [blocks][kv_heads][kTokens][padded_dim]
  const int* tables;  // [sequences][table_width]
  int table_width;
  int kv_heads;

  static constexpr int kTokens = INGOT_TOKENS_PER_BLOCK;

  INGOT_DEVICE int block(int sequence, int position) const {
    return tables[static_cast<int64_t>(sequence) * table_width + position / kTokens];
  }
  INGOT_DEVICE int64_t slot(int block, int position, int kv_head) const {
    return (static_cast<int64_t>(block) * kv_heads + kv_head) * kTokens + position % kTokens;
  }
  INGOT_DEVICE Stored* key(int64_t slot) const { return keys + Slots<kHeadDim, kTokens>::row(slot); }
  INGOT_DEVICE Stored* value(int64_t slot) const { return values + Slots<kPaddedDim, kTokens>::row(slot); }
  INGOT_DEVICE float* scale(int64_t slot, bool of_value) const {
    Stored* from =
        of_value ? values + Slots<kPaddedDim, kTokens>::scale(slot) : keys + Slots<kHeadDim, kTokens>::scale(slot);
    return reinterpret_cast<float*>(from);
  }
};

// How a row becomes codes, as round_to_codes of plugins/kv_codes.py says: its largest magnitude becomes the largest.
struct Rounding {
  float inverse;  // of the scale; 0 where every code is zero
  float scale;    // NaN of a row that is not finite

  // top: the bits of the largest magnitude; those of an infinity or a NaN are largest.
  INGOT_DEVICE explicit Rounding(uint32_t top) {
    const float magnitude = __uint_as_float(top), factor = kLargestCode / magnitude;
    const bool finite = top < 0x7f800000u;
    inverse = finite && __float_as_uint(factor) < 0x7f800000u ? factor : 0.f;
    scale = finite ? magnitude / kLargestCode : __uint_as_float(0x7fc00000u);
  }
  INGOT_DEVICE uint32_t code(float x) const { return inverse > 0.f ? code_of(x * inverse) : 0; }
  INGOT_DEVICE uint32_t four(const Four<float>& x) const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= code(x.at[i]) << (8 * i);
    return word;
  }
};
INGOT_DEVICE uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }
// The larger over as many neighbouring lanes.
template <int kLanes>
INGOT_DEVICE uint32_t largest_of(uint32_t top) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, top, step);
    top = other > top ? other : top;
  }
  return top;
}

// What both ways see of a token. factors: of norms over all heads together, else 1
struct Rotation {
  float* q;  // [heads][kHeadDim]
  PagedCache cache;
  const float* input;  // [heads + 2 * kv_heads][kHeadDim]
  const float* cosines;
  const float* q_norm;
  const float* k_norm;
  int position;
  int sequence;
  int heads;
  int rotary_dim;
  int interleaved;
  int wide_norm;
  float eps;
  float q_factor;
  float k_factor;
  int value_norm;      // values are normed, too, head by head and without a weight
  int keys_as_values;  // the input has no values: they are keys before their norm

  INGOT_DEVICE int all_heads() const { return heads + 2 * cache.kv_heads; }
  INGOT_DEVICE bool is_q(int head) const { return head < heads; }
  INGOT_DEVICE bool is_v(int head) const { return head >= heads + cache.kv_heads; }
  INGOT_DEVICE int kv_head(int head) const { return is_v(head) ? head - heads - cache.kv_heads : head - heads; }
  INGOT_DEVICE int block() const { return cache.block(sequence, position); }
  INGOT_DEVICE int64_t slot(int block, int head) const { return cache.slot(block, position, kv_head(head)); }
  INGOT_DEVICE const float* norm(int head) const {  // null for values, too
    const float* weight = is_q(head) ? q_norm : is_v(head) ? nullptr : k_norm;
    return weight && wide_norm ? weight + static_cast<int64_t>(is_q(head) ? head : kv_head(head)) * kHeadDim : weight;
  }
  INGOT_DEVICE float factor(int head) const { return is_q(head) ? q_factor : k_factor; }
  INGOT_DEVICE const float* source(int head) const {
    const int from = keys_as_values && is_v(head) ? head - cache.kv_heads : head;
    return input + static_cast<int64_t>(from) * kHeadDim;
  }
};

INGOT_DEVICE float sum_of_squares(const Four<float>& x) {
  return x.at[0] * x.at[0] + x.at[1] * x.at[1] + x.at[2] * x.at[2] + x.at[3] * x.at[3];
}
INGOT_DEVICE void scale_four(Four<float>& x, float factor, const Four<float>& weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.at[i] = x.at[i] * factor * weight.at[i];
}
INGOT_DEVICE void rotate(float& x, float& y, float cosine, float sine) {
  const float rotated = x * cosine - y * sine;
  y = y * cosine + x * sine, x = rotated;
}

// The eight dims at place `part` of a head: four, and the four that they are rotated with, or that follow them.
struct RotatedDims {
  bool there, rotated;
  int part, first, second;
  Four<float> x, y;

  INGOT_DEVICE void place(const Rotation& of, int head, int at) {
    part = at, there = part < kHeadDim / 8, rotated = !of.is_v(head) && part < of.rotary_dim / 8;
    first = rotated && !of.interleaved ? 4 * part : 8 * part;
    second = rotated && !of.interleaved ? first + of.rotary_dim / 2 : first + 4;
  }
  INGOT_DEVICE void rotate_all(const Rotation& of, const Four<float>& cosines, const Four<float>& sines) {
    if (rotated && of.interleaved) {
      rotate(x.at[0], x.at[1], cosines.at[0], sines.at[0]), rotate(x.at[2], x.at[3], cosines.at[1], sines.at[1]);
      rotate(y.at[0], y.at[1], cosines.at[2], sines.at[2]), rotate(y.at[2], y.at[3], cosines.at[3], sines.at[3]);
    } else if (rotated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rotate(x.at[i], y.at[i], cosines.at[i], sines.at[i]);
    }
  }
  INGOT_DEVICE uint32_t top() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t own = magnitude_of(i < 4 ? x.at[i % 4] : y.at[i % 4]);
      found = own > found ? own : found;
    }
    return found;
  }
  // In a cache of codes.
  INGOT_DEVICE void store_codes(const Rotation& of, int block, int head, const Rounding& rounding) const {
    const int64_t slot = of.slot(block, head);
    if (of.is_v(head) ? 8 * part >= kPaddedDim : !there) return;
    Stored* to = of.is_v(head) ? of.cache.value(slot) : of.cache.key(slot);
    *reinterpret_cast<uint32_t*>(to + first) = rounding.four(x);
    *reinterpret_cast<uint32_t*>(to + second) = rounding.four(y);
    if (part == 0) *of.cache.scale(slot, of.is_v(head)) = rounding.scale;
  }
  INGOT_DEVICE void store(const Rotation& of, int block, int head, const Rounding& rounding) const {
    if (of.is_q(head)) {
      float* to = of.q + static_cast<int64_t>(head) * kHeadDim;
      if (there) store_four(to + first, x), store_four(to + second, y);
      return;
    }
    if constexpr (kScaled) {
      store_codes(of, block, head, rounding);
    } else if (of.is_v(head)) {  // zeros behind its dims
      if (8 * part < kPaddedDim) store_eight(of.cache.value(of.slot(block, head)) + 8 * part, x, y);
    } else if (there) {
      Stored* to = of.cache.key(of.slot(block, head));
      store_four(to + first, x), store_four(to + second, y);
    }
  }
};

INGOT_DEVICE void rotate_eights(const Rotation& of) {
  const Four<float> zeros{{0.f, 0.f, 0.f, 0.f}};
  const int number = blockIdx.y * kHeadsPerBlock + threadIdx.x / kHeadLanes, lane = threadIdx.x % kHeadLanes;
  const int head = min(number, of.all_heads() - 1);  // every lane joins the shuffles
  const float *weight = of.norm(head), *source = of.source(head);
  RotatedDims each[kHeadParts];
  Four<float> x_weight[kHeadParts], y_weight[kHeadParts], cosines[kHeadParts], sines[kHeadParts];
#pragma unroll
  for (int i = 0; i < kHeadParts; ++i) {
    RotatedDims& own = each[i];
    own.place(of, head, lane + i * kHeadLanes);
    x_weight[i] = weight && own.there ? load_four(weight + own.first) : zeros;
    y_weight[i] = weight && own.there ? load_four(weight + own.second) : zeros;
    own.x = own.there ? load_four(source + own.first) : zeros;
    own.y = own.there ? load_four(source + own.second) : zeros;
    cosines[i] = own.rotated ? load_four(of.cosines + 4 * own.part) : zeros;
    sines[i] = own.rotated ? load_four(of.cosines + of.rotary_dim / 2 + 4 * own.part) : zeros;
  }
  const int block = of.is_q(head) ? 0 : of.block();  // last: it waits for the position
  if (of.q_norm || of.k_norm || of.value_norm) {
    float factor = of.factor(head);
    if (!of.wide_norm || of.value_norm) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadParts; ++i) squares += sum_of_squares(each[i].x) + sum_of_squares(each[i].y);
#pragma unroll
      for (int step = kHeadLanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(kAllLanes, squares, step);
      if (!of.wide_norm || of.is_v(head)) factor = 1.f / sqrtf(squares / kHeadDim + of.eps);
    }
#pragma unroll
    for (int i = 0; i < kHeadParts; ++i) {
      if (weight) scale_four(each[i].x, factor, x_weight[i]), scale_four(each[i].y, factor, y_weight[i]);
      if (of.value_norm && of.is_v(head)) {
        const Four<float> ones{{1.f, 1.f, 1.f, 1.f}};
        scale_four(each[i].x, factor, ones), scale_four(each[i].y, factor, ones);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadParts; ++i) each[i].rotate_all(of, cosines[i], sines[i]);
  uint32_t top = 0;
  if constexpr (kScaled) {
#pragma unroll
    for (int i = 0; i < kHeadParts; ++i) top = each[i].top() > top ? each[i].top() : top;
    top = largest_of<kHeadLanes>(top);
  }
  if (number >= of.all_heads()) return;
  const Rounding rounding(top);
#pragma unroll
  for (int i = 0; i < kHeadParts; ++i) each[i].store(of, block, head, rounding);
}

// The numbers 0 .. kDims - 1 of a token's key or value by one warp.
template <int kDims, class Number>
INGOT_DEVICE void store_row(Stored* to, float* scale, Number number) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (kScaled) {
    uint32_t top = 0;
#pragma unroll 1
    for (int i = lane; i < kDims; i += kWarp) {
      const uint32_t own = magnitude_of(number(i));
      top = own > top ? own : top;
    }
    const Rounding rounding(largest_of<kWarp>(top));
#pragma unroll 1
    for (int i = 2 * lane; i < kDims; i += 2 * kWarp) {  // heads have an even number of dims
      const uint32_t two = rounding.code(number(i)) | rounding.code(number(i + 1)) << 8;
      reinterpret_cast<uint16_t*>(to)[i / 2] = static_cast<uint16_t>(two);
    }
    if (lane == 0) *scale = rounding.scale;
  } else {
#pragma unroll 1
    for (int i = lane; i < kDims; i += kWarp) to[i] = from_float<Kv>(number(i));
  }
}

INGOT_DEVICE void rotate_head(const Rotation& of, int head) {
  const int lane = threadIdx.x % kWarp;
  const float* source = of.source(head);
  if (of.is_v(head)) {
    const int64_t slot = of.slot(of.block(), head);
    float factor = 1.f;
    if (of.value_norm) {
      float squares = 0.f;
#pragma unroll 1
      for (int i = lane; i < kHeadDim; i += kWarp) squares += source[i] * source[i];
      factor = 1.f / sqrtf(warp_sum(squares) / kHeadDim + of.eps);
    }
    store_row<kPaddedDim>(of.cache.value(slot), of.cache.scale(slot, true),
                          [source, factor](int i) { return i < kHeadDim ? source[i] * factor : 0.f; });
    return;
  }
  const float* weight = of.norm(head);
  float factor = of.factor(head);
  if (weight && !of.wide_norm) {
    float squares = 0.f;
#pragma unroll 1
    for (int i = lane; i < kHeadDim; i += kWarp) squares += source[i] * source[i];
    factor = 1.f / sqrtf(warp_sum(squares) / kHeadDim + of.eps);
  }
  const auto normed = [source, factor, weight](int i) { return weight ? source[i] * factor * weight[i] : source[i]; };
  const int half = of.rotary_dim / 2;
  const auto rotated = [&of, &normed, half](int i) {
    float value = normed(i);
    if (i < of.rotary_dim) {
      const bool second = of.interleaved ? i % 2 : i >= half;
      const int pair = of.interleaved ? i / 2 : second ? i - half : i;
      const float other = normed(of.interleaved ? i ^ 1 : second ? pair : i + half);
      const float sine = of.cosines[half + pair];
      value = value * of.cosines[pair] + (second ? other * sine : -other * sine);
    }
    return value;
  };
  if (of.is_q(head)) {
#pragma unroll 1
    for (int i = lane; i < kHeadDim; i += kWarp) of.q[static_cast<int64_t>(head) * kHeadDim + i] = rotated(i);
    return;
  }
  const int64_t slot = of.slot(of.block(), head);
  store_row<kHeadDim>(of.cache.key(slot), of.cache.scale(slot, false), rotated);
}

// The sums of two values over the block, with one barrier.
INGOT_DEVICE void sum_both(float& one, float& other, float (&scratch)[2][kRopeWarps]) {
  one = warp_sum(one), other = warp_sum(other);
  if (threadIdx.x % kWarp == 0) scratch[0][threadIdx.x / kWarp] = one, scratch[1][threadIdx.x / kWarp] = other;
  __syncthreads();
  one = other = 0.f;
  for (int warp = 0; warp < kRopeWarps; ++warp) one += scratch[0][warp], other += scratch[1][warp];
}

INGOT_DEVICE float squares_of_row(const float* row, int columns) {
  float sum = 0.f;
  if constexpr (kHeadDim % 4 == 0) {
#pragma unroll 2
    for (int i = 4 * threadIdx.x; i < columns; i += 4 * kRopeThreads) sum += sum_of_squares(load_four(row + i));
  } else {
#pragma unroll 2
    for (int i = threadIdx.x; i < columns; i += kRopeThreads) sum += row[i] * row[i];
  }
  return sum;
}

#define INGOT_ROTATION_PARAMETERS                                                                                     \
  float *q, Stored *keys, Stored *values, const float *qkv, const float *cos_sin, const float *q_norm,                \
      const float *k_norm, const int *positions, const int *sequences, const int *tables, int table_width, int heads, \
      int kv_heads, int rotary_dim, int interleaved, int wide_norm, float eps

INGOT_DEVICE void rotate_token(INGOT_ROTATION_PARAMETERS, int value_norm, int keys_as_values,
                               float (&scratch)[2][kRopeWarps]) {
  const int64_t token = blockIdx.x;
  const float* input = qkv + token * (heads + (keys_as_values ? 1 : 2) * kv_heads) * kHeadDim;
  float q_factor = 1.f, k_factor = 1.f;  // norms over all heads together: every block sums them by itself
  if (wide_norm) {
    q_factor = squares_of_row(input, heads * kHeadDim);
    k_factor = squares_of_row(input + heads * kHeadDim, kv_heads * kHeadDim);
    sum_both(q_factor, k_factor, scratch);
    q_factor = 1.f / sqrtf(q_factor / (heads * kHeadDim) + eps);
    k_factor = 1.f / sqrtf(k_factor / (kv_heads * kHeadDim) + eps);
  }
  const Rotation of{q + token * heads * kHeadDim,
                    {keys, values, tables, table_width, kv_heads},
                    input,
                    cos_sin + token * rotary_dim,
                    q_norm,
                    k_norm,
                    positions[token],
                    sequences[token],
                    heads,
                    rotary_dim,
                    interleaved,
                    wide_norm,
                    eps,
                    q_factor,
                    k_factor,
                    value_norm,
                    keys_as_values};
  if constexpr (kHeadDim % 8 == 0) {
    if (rotary_dim % 8 == 0) {
      rotate_eights(of);
      return;
    }
  }
  const int all = min(of.all_heads(), static_cast<int>(blockIdx.y + 1) * kHeadsPerBlock);
#pragma unroll 1
  for (int head = blockIdx.y * kHeadsPerBlock + threadIdx.x / kWarp; head < all; head += kRopeWarps) {
    rotate_head(of, head);
  }
}

#define INGOT_ROTATION_ARGUMENTS                                                                             \
  q, keys, values, qkv, cos_sin, q_norm, k_norm, positions, sequences, tables, table_width, heads, kv_heads, \
      rotary_dim, interleaved, wide_norm, eps

// Without KV heads, queries alone.
INGOT_KERNEL(kRopeThreads) rotate_and_store(INGOT_ROTATION_PARAMETERS) {
  __shared__ float scratch[2][kRopeWarps];
  wait_for_previous();
  rotate_token(INGOT_ROTATION_ARGUMENTS, 0, 0, scratch);
}

INGOT_KERNEL(kRopeThreads)
rotate_and_make_values(INGOT_ROTATION_PARAMETERS, int value_norm, int keys_as_values) {
  __shared__ float scratch[2][kRopeWarps];
  wait_for_previous();
  rotate_token(INGOT_ROTATION_ARGUMENTS, value_norm, keys_as_values, scratch);
}
