// Causal attention over pages, flash style: 16-bit caches on the matrix units, float32 caches warp by warp.
// Prompts: see prefill_attention.cuh. Decode: see decode_attention.cuh, and decode_codes.cuh for codes.
// Heads of more than 256 dims: see wide_attention.cuh.
//
// Grid: (items, kv_heads, splits). A split of decode takes an equal share of the item's KV tiles; combine merges the
// splits.
#include "paged_attention.cuh"

#ifndef INGOT_KV_IS_F32
#if INGOT_HEAD_DIM > 256
#include "wide_attention.cuh"

constexpr int kDecodeTile = WideShape<16>::kTile;

INGOT_KERNEL_TO_SHARE(WideShape<32>::kThreads, 2) attention_prefill(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ WideWork<32> work;
  const PrefillBlock block(kv_heads);
  attend_wide<32>(memory, work, INGOT_ATTENTION, block.item, block.part, block.kv_head);
}

INGOT_KERNEL_TO_SHARE(WideShape<16>::kThreads, 2) attention_decode(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ WideWork<16> work;
  attend_wide<16>(memory, work, INGOT_ATTENTION, blockIdx.x, 0, blockIdx.y);
}

#else
#include "decode_attention.cuh"
#include "prefill_attention.cuh"
#ifdef INGOT_WARPGROUPS
#include "prompt_attention.cuh"
#endif

#if defined(INGOT_KV_CODES) && INGOT_HEAD_DIM % 16 == 0
#include "decode_codes.cuh"
#endif
constexpr int kDecodeBlocks = kCodesAhead && kPaddedDim <= 128 ? 4 : 1;  // of a multiprocessor, at least

#ifdef INGOT_WARPGROUPS
INGOT_KERNEL(PromptShape::kThreads)
attention_prompt(INGOT_ATTENTION_PARAMETERS, const int* items_of_step, int parts) {
  wait_for_previous();
  INGOT_SHARED_WIDE(wide);
  __shared__ PromptSignals signals;
  const Attention at = INGOT_ATTENTION;
  attend_pieces<false>(wide, signals, at, *items_of_step, parts);
}

// The same of scores that take more than a scale.
INGOT_KERNEL(PromptShape::kThreads)
attention_prompt_bent(INGOT_ATTENTION_PARAMETERS, const int* items_of_step, int parts) {
  wait_for_previous();
  INGOT_SHARED_WIDE(wide);
  __shared__ PromptSignals signals;
  const Attention at = INGOT_ATTENTION;
  attend_pieces<true>(wide, signals, at, *items_of_step, parts);
}
#else
INGOT_KERNEL_TO_SHARE(PrefillShape::kThreads, PrefillShape::kBlocks)
attention_prefill(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ PrefillWork work;
  attend_prompt(memory, work, INGOT_ATTENTION);
}
#endif

INGOT_KERNEL_TO_SHARE(kAttentionThreads, kDecodeBlocks) attention_decode(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
#if defined(INGOT_KV_CODES) && INGOT_HEAD_DIM % 16 == 0
  attend_codes(memory, INGOT_ATTENTION);
#else
  attend_item<1>(memory, INGOT_ATTENTION);
#endif
}
constexpr int kDecodeTile = TileShape<1>::kTile;
#endif

// y = the splits of attention_decode, weighted. Grid: as attention_decode's; the blocks of an item share its elements.
INGOT_KERNEL(kAttentionThreads)
attention_combine(void* y, const Item* items, const float* partial, const float* stats, int heads, int kv_heads,
                  int window, const float* sinks, int narrow) {
  constexpr int kMostSplits = 64, kRows = 16;  // MAX_SPLITS in shapes.py
  __shared__ float factors[kRows][kMostSplits], weights[kRows];
  let_next_begin();
  wait_for_previous();
  const int splits = gridDim.z, kv_head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Attention at{};
  at.heads = heads, at.kv_heads = kv_heads, at.window = window, at.sinks = sinks;
  const Item item = items[blockIdx.x];
  const int rows = item.count * (heads / kv_heads), begin = blockIdx.z * kAttentionThreads;
  if (begin >= rows * kHeadDim) return;
  const int end = item.position + item.count;
  const int used = Splits<kDecodeTile>(at.first_visible(item.position), end, splits).used;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kv_heads + kv_head) * splits;
  for (int row = warp; row < rows; row += kAttentionThreads / kWarp) {  // a lane takes two splits
    float tops[2], own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = lane + i * kWarp;
      const float* from = stats + ((first + (split < used ? split : 0)) * kRows + row) * 2;
      tops[i] = split < used ? from[0] : minus_infinity(), own[i] = split < used ? from[1] : 0.f;
    }
    float top = fmaxf(tops[0], tops[1]), weight = 0.f;
    for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = exp2f((tops[i] - top) * kLog2e);
      factors[row][lane + i * kWarp] = factor;
      weight += own[i] * factor;
    }
    weight = warp_sum(weight);
    if (lane == 0) weights[row] = at.with_sink(weight, top, at.head(row, kv_head));  // once, whatever the splits
  }
  __syncthreads();
  for (int i = begin + threadIdx.x; i < rows * kHeadDim; i += splits * kAttentionThreads) {
    const int row = i / kHeadDim, dim = i % kHeadDim;
    const float* from = partial + (first * kRows + row) * kHeadDim + dim;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < used; ++split) {
      sum += from[static_cast<int64_t>(split) * kRows * kHeadDim] * factors[row][split];
    }
    store_activation(y, at.place(item, row, kv_head) * kHeadDim + dim, sum / weights[row], narrow);
  }
}

#else  // a float32 cache: for comparisons, not for speed

// A warp takes every fourth row of the item, token by token. Grid: (items, kv_heads)
INGOT_KERNEL(kAttentionThreads) attention_rows(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  constexpr int kPerLane = (kHeadDim + kWarp - 1) / kWarp;
  const Attention at = INGOT_ATTENTION;
  const Item item = at.items[blockIdx.x];
  const int kv_head = blockIdx.y, group = at.heads / at.kv_heads, lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < item.count * group; row += kAttentionThreads / kWarp) {
    const int64_t place = at.place(item, row, kv_head) * kHeadDim;
    const int last = item.position + row / group;
    const float scale = at.scale_at(last), slope = at.slopes ? at.slopes[at.head(row, kv_head)] : 0.f;
    float query[kPerLane], sums[kPerLane], top = minus_infinity(), weight = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      query[i] = i * kWarp + lane < kHeadDim ? at.q[place + i * kWarp + lane] : 0.f;
      sums[i] = 0.f;
    }
    for (int position = at.first_visible(last); position <= last; ++position) {
      const int64_t slot = at.slot(item, position, kv_head);
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kWarp + lane;
        if (dim < kHeadDim) score += query[i] * number_of(at.key(slot)[dim]);
      }
      score = warp_sum(score) * scale;
      if constexpr (kScaled) score *= at.key_scale(slot);
      score = at.bent(score);
      if (at.slopes) score += at.bias(slope, last, position);
      const float highest = fmaxf(top, score);
      const float factor = expf(top - highest), share = expf(score - highest);
      top = highest;
      weight = weight * factor + share;
      const float scaled = kScaled ? share * at.value_scale(slot) : share;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kWarp + lane;
        if (dim < kHeadDim) sums[i] = sums[i] * factor + scaled * number_of(at.value(slot)[dim]);
      }
    }
    weight = at.with_sink(weight, top, at.head(row, kv_head));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int dim = i * kWarp + lane;
      if (dim < kHeadDim) store_activation(at.y, place + dim, sums[i] / weight, at.narrow);
    }
  }
}
#endif
