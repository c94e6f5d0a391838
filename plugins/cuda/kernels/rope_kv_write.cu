// Norms queries and keys where the model does, rotates them, and writes keys and values into the paged cache.
//
//   K block [kv_heads][tokens_per_block][head_dim]      V block [kv_heads][tokens_per_block][padded_dim]
//
// Grid: (tokens, groups of 8 heads); a warp takes one head of q, k or v.
#include "device.cuh"

constexpr int kRopeThreads = 256;
constexpr int kHeadsPerBlock = kRopeThreads / kWarp;

struct PagedCache {
  Kv* keys;           // of this layer: [blocks][kv_heads][tokens_per_block][head_dim]
  Kv* values;         // [blocks][kv_heads][tokens_per_block][padded_dim]
  const int* tables;  // [sequences][table_width]
  int table_width;
  int tokens_per_block;
  int kv_heads;

  INGOT_DEVICE int64_t slot(int sequence, int position, int kv_head) const {
    const int64_t block = tables[static_cast<int64_t>(sequence) * table_width + position / tokens_per_block];
    return (block * kv_heads + kv_head) * tokens_per_block + position % tokens_per_block;
  }
};

INGOT_KERNEL(kRopeThreads)
turn_and_store(float* q, Kv* keys, Kv* values, const float* qkv, const float* cos_sin, const float* q_norm,
               const float* k_norm, const int* positions, const int* sequences, const int* tables, int table_width,
               int tokens_per_block, int heads, int kv_heads, int rotary_dim, int interleaved, int wide_norm,
               float eps) {
  __shared__ float rows[kHeadsPerBlock][kHeadDim];
  __shared__ float scratch[kHeadsPerBlock];
  const PagedCache cache{keys, values, tables, table_width, tokens_per_block, kv_heads};
  const int64_t token = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float* input = qkv + token * (heads + 2 * kv_heads) * kHeadDim;

  float q_factor = 1.f, k_factor = 1.f;  // norms over all heads together: every block sums them by itself
  if (wide_norm) {
    float q_squares = 0.f, k_squares = 0.f;
    for (int i = threadIdx.x; i < heads * kHeadDim; i += kRopeThreads) q_squares += input[i] * input[i];
    const float* k_input = input + heads * kHeadDim;
    for (int i = threadIdx.x; i < kv_heads * kHeadDim; i += kRopeThreads) k_squares += k_input[i] * k_input[i];
    q_factor = 1.f / sqrtf(block_sum<kRopeThreads>(q_squares, scratch) / (heads * kHeadDim) + eps);
    k_factor = 1.f / sqrtf(block_sum<kRopeThreads>(k_squares, scratch) / (kv_heads * kHeadDim) + eps);
  }

  const int head = blockIdx.y * kHeadsPerBlock + warp;
  if (head >= heads + 2 * kv_heads) return;
  const bool is_q = head < heads, is_v = head >= heads + kv_heads;
  const int kv_head = is_v ? head - heads - kv_heads : head - heads;
  const float* source = input + static_cast<int64_t>(head) * kHeadDim;
  if (is_v) {
    Kv* to = values + cache.slot(sequences[token], positions[token], kv_head) * kPaddedDim;
    for (int i = lane; i < kPaddedDim; i += kWarp) to[i] = from_float<Kv>(i < kHeadDim ? source[i] : 0.f);
    return;
  }

  const float* weight = is_q ? q_norm : k_norm;
  float factor = is_q ? q_factor : k_factor;
  if (weight && !wide_norm) {
    float squares = 0.f;
    for (int i = lane; i < kHeadDim; i += kWarp) squares += source[i] * source[i];
    factor = 1.f / sqrtf(warp_sum(squares) / kHeadDim + eps);
  }
  if (weight && wide_norm) weight += static_cast<int64_t>(is_q ? head : kv_head) * kHeadDim;
  float* row = rows[warp];
  for (int i = lane; i < kHeadDim; i += kWarp) row[i] = weight ? source[i] * factor * weight[i] : source[i];
  __syncwarp();

  const int half = rotary_dim / 2;
  const float* cosines = cos_sin + token * rotary_dim;
  Kv* key = is_q ? nullptr : keys + cache.slot(sequences[token], positions[token], kv_head) * kHeadDim;
  float* query = q + (token * heads + head) * kHeadDim;
  for (int i = lane; i < kHeadDim; i += kWarp) {
    float value = row[i];
    if (i < rotary_dim) {
      const int pair = interleaved ? i / 2 : i % half;
      const bool second = interleaved ? i % 2 : i >= half;
      const float other = row[interleaved ? i ^ 1 : (second ? i - half : i + half)];
      const float sine = cosines[half + pair];
      value = value * cosines[pair] + (second ? other * sine : -other * sine);
    }
    if (is_q) {
      query[i] = value;
    } else {
      key[i] = from_float<Kv>(value);
    }
  }
}
