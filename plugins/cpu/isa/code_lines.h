// Codes of kBits bits: where their bits lie in lines of panels (plugins/layouts.py); and where their scales are whole
// numbers of units, which sums of them fit 16 bits.
#pragma once

#include <cstdint>

namespace ingot {

template <int64_t kBits>
struct CodeLines {
  static constexpr int kLow = kBits < 4 ? 2 : 4;  // bits that lie together
  static constexpr int kUpper = static_cast<int>(kBits) - kLow;
  static constexpr int kLowQuads = 8 / kLow;                   // quads of columns in a line of low bits
  static constexpr int kQuads = kUpper == 0 ? 4 : 8 / kUpper;  // that share lines
  static constexpr int kLowLines = kQuads / kLowQuads;         // and one of upper bits behind them
  static constexpr bool kSigned = kBits == 3 || kBits == 6;    // stored with half of their number more
  static constexpr int kBias = kSigned ? 1 << (kBits - 1) : 0;
  static constexpr bool kEights = kBits > 4;  // sums of 8 columns fit 16 bits; else those of 16 do
  static constexpr bool kSignedScales = kBits != 2 && kBits != 4;
};

}  // namespace ingot
