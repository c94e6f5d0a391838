// Ops of several residual streams, and cut_below, a row of all of them per turn: bound by the bytes of the streams.
#pragma once

#include <algorithm>
#include <cmath>

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "isa/simd_lanes.h"
#include "streams/add_to_streams_args.h"
#include "streams/cut_below_args.h"
#include "streams/match_magnitude_args.h"
#include "streams/mix_streams_args.h"

namespace ingot {
namespace {

template <typename S>
void mix_streams(const MixStreamsArgs& args, const Team& team) {
  using V = typename S::V;
  const int64_t count = args.streams, width = args.width;
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* x = args.x + row * count * width;
    const float* coefs = args.coefs + row * count * count;
    for (int64_t i = 0; i < count; ++i, coefs += count) {
      float* y = args.y + (row * count + i) * width;
      for (int64_t at = 0; at < width; at += S::kWidth) {
        const int64_t n = width - at;
        V sum = load_lanes<S>(x + i * width + at, n);
        for (int64_t j = 0; j < count; ++j) sum = S::fma(S::set1(coefs[j]), load_lanes<S>(x + j * width + at, n), sum);
        store_lanes<S>(y + at, sum, n);
      }
    }
  }
}

template <typename S>
void add_to_streams(const AddToStreamsArgs& args, const Team& team) {
  using V = typename S::V;
  const int64_t count = args.streams, width = args.width;
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* x = args.x + row * count * width;
    const float* made = args.made + row * width;
    float* y = args.y + row * count * width;
    for (int64_t i = 0; i < count; ++i) {
      const V part = S::set1(args.coefs != nullptr ? 1.0f + args.coefs[row * count + i]
                             : i == args.active    ? 0.0f
                                                   : 1.0f);
      for (int64_t at = 0; at < width; at += S::kWidth) {
        const int64_t n = width - at;
        V added = load_lanes<S>(made + at, n);
        if (args.coefs != nullptr) added = S::sub(added, load_lanes<S>(x + args.active * width + at, n));
        const V old = load_lanes<S>(x + i * width + at, n);
        const bool stays = args.coefs == nullptr && i == args.active;
        store_lanes<S>(y + i * width + at, stays ? old : S::fma(part, added, old), n);
      }
    }
  }
}

template <typename S>
float mean_square(const float* x, int64_t width) {
  const float squares = row_sum<S>(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const typename S::V v = load_lanes<S>(x + i, n);
    return S::mul(v, v);
  });
  return squares / static_cast<float>(width);
}

template <typename S>
void match_magnitude(const MatchMagnitudeArgs& args, const Team& team) {
  const int64_t count = args.streams, width = args.width;
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* like = args.like + row * width;
    float* y = args.y + row * (count + (args.joins ? 1 : 0)) * width;
    if (args.joins) y = std::copy_n(like, width, y);
    const float wanted = std::sqrt(mean_square<S>(like, width));
    for (int64_t i = 0; i < count; ++i, y += width) {
      const float* x = args.x + (row * count + i) * width;
      const float square = mean_square<S>(x, width);
      const auto factor = S::set1(wanted / std::sqrt(square < args.least ? args.least : square));
      for (int64_t at = 0; at < width; at += S::kWidth)
        store_lanes<S>(y + at, S::mul(load_lanes<S>(x + at, width - at), factor), width - at);
    }
  }
}

template <typename S>
void cut_below(const CutBelowArgs& args, const Team& team) {
  using V = typename S::V;
  const Team::Range mine = team.share(args.rows);
  const auto count = static_cast<float>(args.cols);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* x = args.x + row * args.cols;
    const float mean = row_sum<S>(args.cols, [&](int64_t i, int64_t n)
                                                 __attribute__((always_inline)) { return load_lanes<S>(x + i, n); }) /
                       count;
    const V middle = S::set1(mean);
    const float squares = row_sum<S>(args.cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      const V apart = S::sub(load_lanes<S>(x + i, n), middle);
      return S::select(S::first_lanes(n < S::kWidth ? n : S::kWidth), S::mul(apart, apart), S::zero());
    });
    const V cut = S::set1(mean + args.deviations * std::sqrt(squares / count));
    for (int64_t i = 0; i < args.cols; i += S::kWidth) {
      const int64_t n = args.cols - i;
      store_lanes<S>(args.y + row * args.cols + i, S::max(S::zero(), S::sub(load_lanes<S>(x + i, n), cut)), n);
    }
  }
}

}  // namespace
}  // namespace ingot
