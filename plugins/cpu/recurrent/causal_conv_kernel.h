// causal_conv: each thread takes some channels of all tokens, so that none reads a state that another one writes.
#pragma once

#include <algorithm>
#include <cstring>

#include "ingot/kernel.h"
#include "isa/simd_lanes.h"
#include "matmul/activations.h"
#include "recurrent/causal_conv_args.h"

namespace ingot {
namespace {

// Channels [begin, begin + n) of one stretch. tail: [width - 1, n], this thread's own.
template <typename S>
void convolve(const CausalConvArgs& args, int64_t channel, int64_t n, int64_t begin, int64_t end, const float* before,
              float* after, float* tail) {
  const int64_t kept = args.width - 1, row = args.channels, count = end - begin;
  const float* x = args.x + begin * row + channel;
  const auto bytes = static_cast<size_t>(n) * sizeof(float);
  for (int64_t i = 0; i < kept; ++i) {
    if (before == nullptr)
      std::memset(tail + i * n, 0, bytes);
    else
      std::memcpy(tail + i * n, before + i * row + channel, bytes);
  }
  const auto input = [&](int64_t i) { return i < kept ? tail + i * n : x + (i - kept) * row; };  // oldest first
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t c = 0; c < n; c += S::kWidth) {
      const int64_t lanes = n - c;
      typename S::V sum = args.bias ? load_lanes<S>(args.bias + channel + c, lanes) : S::zero();
      for (int64_t j = 0; j <= kept; ++j)
        sum = S::fma(load_lanes<S>(args.weight + j * row + channel + c, lanes), load_lanes<S>(input(t + j) + c, lanes),
                     sum);
      store_lanes<S>(args.y + (begin + t) * row + channel + c, args.silu ? over_logistic<S>(sum, sum) : sum, lanes);
    }
  }
  for (int64_t i = 0; i < kept; ++i) std::memcpy(after + i * row + channel, input(count + i), bytes);
}

template <typename S>
void causal_conv(const CausalConvArgs& args, const Team& team) {
  const Team::Range lines = team.share((args.channels + 15) / 16);
  const int64_t channel = lines.begin * 16, n = std::min(lines.end * 16, args.channels) - channel;
  if (n <= 0) return;
  auto* tail = reinterpret_cast<float*>(team.scratch(static_cast<size_t>((args.width - 1) * n) * sizeof(float)));
  for (int64_t s = 0; s < args.kv.sequences; ++s)
    args.kv.for_each_run(s, [&](int64_t begin, int64_t end, const float* before, float* after) {
      convolve<S>(args, channel, n, begin, end, before, after, tail);
    });
}

}  // namespace
}  // namespace ingot
