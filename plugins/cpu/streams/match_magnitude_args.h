// What kernels of match_magnitude take.
#pragma once

#include <cstdint>

namespace ingot {

// See plugins/ops/match_magnitude.py.
struct MatchMagnitudeArgs {
  const float* x;     // [rows, streams, width]
  const float* like;  // [rows, width]
  float* y;           // [rows, streams, width], with `like` before them where it joins
  int64_t rows, streams, width;
  float least;
  bool joins;
};

}  // namespace ingot
