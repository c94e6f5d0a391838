// Cosines and sines of each token's angles: once per step for all layers, so that libm's accurate functions will do.
#pragma once

#include <cmath>

#include "attention/rope_table_args.h"
#include "ingot/kernel.h"

namespace ingot {
namespace {

void rope_table(const RopeTableArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    float* cosines = args.y + t * 2 * args.half;
    float* sines = cosines + args.half;
    const auto position = static_cast<float>(args.positions[t]);
    for (int64_t i = 0; i < args.half; ++i) {
      const double angle = position * args.inv_freq[i];  // rounded to float32, as in the source models
      cosines[i] = static_cast<float>(std::cos(angle) * args.scale);
      sines[i] = static_cast<float>(std::sin(angle) * args.scale);
    }
  }
}

}  // namespace
}  // namespace ingot
