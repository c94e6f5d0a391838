// How weights of int8 (w8, w8t), int4 (w4, w4t) and FP8 lie in panels, see plugins/layouts.py: a header, then tiles of
// 1 KiB. A tile of int8 is 64 k of 16 columns, line r holding k = 4r .. 4r+3 of each column. A tile of w4 is two of
// those, in its low and its high nibbles; of w4t a line holds eight k, the first four in its low nibbles.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "ingot/kernel.h"
#include "isa/code_lines.h"
#include "matmul/weight_formats.h"

namespace ingot {
namespace {

constexpr int64_t kTileK = 64;  // k in a tile of int8
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileLines = 16;
constexpr int64_t kQuantLine = 64;  // bytes

inline int64_t tiles_of(int64_t k) { return (k + kTileK - 1) / kTileK; }

// Bytes that the codes of so many tiles of int8 take.
template <typename Format>
constexpr int64_t code_bytes(int64_t tiles) {
  return tiles * kTileBytes * Format::kBits / 8;
}

struct W8 {
  static constexpr int64_t kBits = 8, kTiles = 1;  // tiles of int8 that one KiB holds
  int64_t k, group;

  template <typename Args>
  explicit W8(const Args& args) : k(args.k), group(0) {}
  int64_t data_offset() const { return kHeaderBytes; }
  int64_t panel_bytes() const { return data_offset() + tiles_of(k) * kTileBytes; }

  const std::byte* stored(const std::byte* panel, int64_t at_k) const {
    return panel + data_offset() + at_k / kTileK * kTileBytes;
  }

  const int8_t* multipliers(const std::byte*, int64_t) const { return nullptr; }

  // Tiles [first, first + count) of int8, where they lie.
  template <typename I>
  const std::byte* tiles(const std::byte* panel, int64_t first, int64_t, std::byte*) const {
    return panel + data_offset() + first * kTileBytes;
  }
};

struct W4 {
  static constexpr int64_t kBits = 4, kTiles = 2;
  int64_t k, group;  // a power of two, at least 32

  template <typename Args>
  explicit W4(const Args& args)
      : k(args.k),
        group(args.group),
        group_bits_(std::countr_zero(static_cast<uint64_t>(group))),
        data_offset_(kHeaderBytes + (((blocks() * 2 * kTileK + group - 1) >> group_bits_) * 16 + kQuantLine - 1) /
                                        kQuantLine * kQuantLine) {}
  int64_t blocks() const { return (tiles_of(k) + 1) / 2; }
  int64_t data_offset() const { return data_offset_; }
  int64_t panel_bytes() const { return data_offset() + blocks() * kTileBytes; }

  const std::byte* stored(const std::byte* panel, int64_t at_k) const {
    return panel + data_offset() + at_k / (2 * kTileK) * kTileBytes;
  }
  const int8_t* multipliers(const std::byte* panel, int64_t at_k) const {
    return reinterpret_cast<const int8_t*>(panel + kHeaderBytes) + (at_k >> group_bits_) * 16;
  }

  // The two int8 tiles of a block. Meanwhile fetches the KiB at `ahead`.
  template <typename I>
  void unpack(const std::byte* panel, int64_t block, std::byte* to, const std::byte* ahead) const {
    constexpr int64_t kRun = 8;  // lines that surely share their multipliers: 32 k
    const std::byte* codes = panel + data_offset() + block * kTileBytes;
    const int64_t block_k = block * 2 * kTileK;
    if (group >= 2 * kTileK) {
      const auto all = I::multipliers(multipliers(panel, block_k));
      return unpack_lines<I, kTileLines>(codes, all, all, to, ahead);
    }
    for (int64_t line = 0; line < kTileLines; line += kRun) {
      const auto low = I::multipliers(multipliers(panel, block_k + line * 4));
      const auto high = I::multipliers(multipliers(panel, block_k + kTileK + line * 4));
      const int64_t at = line * kQuantLine;
      unpack_lines<I, kRun>(codes + at, low, high, to + at, ahead + at);
    }
  }

  // Tiles [first, first + count), first even, unpacked to `to`, which has room for one more.
  template <typename I>
  const std::byte* tiles(const std::byte* panel, int64_t first, int64_t count, std::byte* to) const {
    constexpr int64_t kAhead = 2;  // blocks
    for (int64_t tile = 0; tile < count; tile += 2) {
      const int64_t block = (first + tile) / 2;
      unpack<I>(panel, block, to + tile * kTileBytes, panel + data_offset() + (block + kAhead) * kTileBytes);
    }
    return to;
  }

 private:
  template <typename I, int64_t kLines, typename Multipliers>
  [[gnu::always_inline]] static inline void unpack_lines(const std::byte* codes, const Multipliers& low,
                                                         const Multipliers& high, std::byte* to,
                                                         const std::byte* ahead) {
#pragma GCC unroll 8
    for (int64_t at = 0; at < kLines * kQuantLine; at += kQuantLine) {
      I::prefetch_codes(ahead + at);
      I::unpack(codes + at, low, high, to + at, to + kTileBytes + at);
    }
  }

  int group_bits_;
  int64_t data_offset_;
};

// w2t, w3t, w4t and w8t, and w4ts and w8ts with a shift beside each scale.
template <int64_t kCodeBits, bool kShift>
struct Grouped {
  static constexpr int64_t kBits = kCodeBits;
  // k of codes that share lines: those of a line of nibbles, and of two lines of bytes
  static constexpr int64_t kLineK = kBits < 4 ? CodeLines<kBits>::kQuads * 4 : 8;
  static constexpr int64_t kCodeBytes = kLineK * kPanel * kBits / 8;
  static constexpr int64_t kValues = kShift ? 2 : 1;
  static constexpr bool kUnits = false;
  int64_t k, group;  // a power of two, at least 16

  template <typename Args>
  explicit Grouped(const Args& args)
      : k(args.k), group(args.group), group_bits_(std::countr_zero(static_cast<uint64_t>(group))) {
    const int64_t bytes = ((blocks() * 2 * kTileK + group - 1) >> group_bits_) * 16 * 2 * kValues;
    data_offset_ = kHeaderBytes + (bytes + kQuantLine - 1) / kQuantLine * kQuantLine;
  }
  int64_t blocks() const { return (tiles_of(k) + 1) / 2; }
  int64_t data_offset() const { return data_offset_; }
  int64_t panel_bytes() const { return data_offset() + code_bytes<Grouped>(blocks() * 2); }

  const std::byte* stored(const std::byte* panel, int64_t at_k) const {
    return panel + data_offset() + at_k / kLineK * kCodeBytes;
  }
  // float16, of the group of k and those that follow
  const int8_t* multipliers(const std::byte* panel, int64_t at_k) const {
    return reinterpret_cast<const int8_t*>(panel + kHeaderBytes) + (at_k >> group_bits_) * 16 * 2 * kValues;
  }
  int group_bits() const { return group_bits_; }

 private:
  int group_bits_;
  int64_t data_offset_;
};

template <bool kShift>
using W4t = Grouped<4, kShift>;
template <bool kShift>
using W8t = Grouped<8, kShift>;
using W2t = Grouped<2, false>;
using W3t = Grouped<3, false>;

// w2ks, w3k, w4ks, w5ks and w6k: the scale of a group, and its offset, are whole numbers of units that kUnitK columns
// share; codes are whole numbers from 0 on, or from -kBias on where there are no offsets. The numbers of kUnitK columns
// lie together: units, float16, of scales and of offsets; scales of each group, int8; offsets of pairs of groups, a
// pair of each column.
template <int64_t kCodeBits, bool kShift>
struct InUnits {
  static constexpr int64_t kBits = kCodeBits;
  static constexpr int64_t kLineK = CodeLines<kBits>::kQuads * 4, kCodeBytes = kLineK * kPanel * kBits / 8;
  static constexpr int64_t kValues = kShift ? 2 : 1;
  static constexpr int32_t kBias = kShift ? 0 : 1 << (kBits - 1);
  static constexpr bool kUnits = true;
  static constexpr int64_t kShortestGroup = kBits == 4 || kBits == 5 ? 32 : 16;
  static_assert(kShift != CodeLines<kBits>::kSigned);
  int64_t k, group;  // 16 or 32

  template <typename Args>
  explicit InUnits(const Args& args)
      : k(args.k), group(args.group), group_bits_(std::countr_zero(static_cast<uint64_t>(group))) {
    data_offset_ = kHeaderBytes + (units() * unit_bytes(group_bits_) + kQuantLine - 1) / kQuantLine * kQuantLine;
  }
  static constexpr int64_t unit_bytes(int group_bits) {
    return kPanel * kValues * (int64_t{sizeof(uint16_t)} + (kUnitK >> group_bits));
  }
  int64_t units() const { return (k + kUnitK - 1) / kUnitK; }
  int64_t data_offset() const { return data_offset_; }
  int64_t panel_bytes() const { return data_offset() + code_bytes<InUnits>(units() * (kUnitK / kTileK)); }

  const std::byte* stored(const std::byte* panel, int64_t at_k) const {
    return panel + data_offset() + at_k / kLineK * kCodeBytes;
  }
  // the numbers of kUnitK columns from at_k on, and of those that follow
  const int8_t* multipliers(const std::byte* panel, int64_t at_k) const {
    return reinterpret_cast<const int8_t*>(panel + kHeaderBytes) + at_k / kUnitK * unit_bytes(group_bits_);
  }
  int group_bits() const { return group_bits_; }

 private:
  int group_bits_;
  int64_t data_offset_;
};

// Where the numbers of kUnitK columns lie.
template <typename Format>
struct UnitNumbers {
  const uint16_t *scale, *offset;  // units
  const int8_t *scales, *offsets;

  UnitNumbers(const int8_t* numbers, int group_bits)
      : scale(reinterpret_cast<const uint16_t*>(numbers)),
        offset(scale + kPanel),
        scales(numbers + kPanel * Format::kValues * int64_t{sizeof(uint16_t)}),
        offsets(scales + kPanel * (kUnitK >> group_bits)) {}
};

using W2ks = InUnits<2, true>;
using W3k = InUnits<3, false>;
using W4ks = InUnits<4, true>;
using W5ks = InUnits<5, true>;
using W6k = InUnits<6, false>;

// FP8 (E4M3): lines of four k, each of 16 columns one after another, behind the scales of all groups.
struct F8 {
  static constexpr int64_t kLineK = 4;
  int64_t k, group;  // 0: rows have one scale; else a power of two, at least 16

  template <typename Args>
  explicit F8(const Args& args)
      : k(args.k),
        group(args.group),
        data_offset_(kHeaderBytes +
                     (group == 0 ? 0 : (tiles_of(k) * kTileK + group - 1) / group * kPanel * int64_t{sizeof(float)})) {}
  int64_t data_offset() const { return data_offset_; }
  int64_t panel_bytes() const { return data_offset() + tiles_of(k) * kTileBytes; }

  const std::byte* stored(const std::byte* panel, int64_t at_k) const { return panel + data_offset() + at_k * kPanel; }
  // Of the group of k and those that follow; null where there are no groups.
  const float* scales(const std::byte* panel, int64_t at_k) const {
    return group == 0 ? nullptr : reinterpret_cast<const float*>(panel + kHeaderBytes) + at_k / group * kPanel;
  }

 private:
  int64_t data_offset_;
};
static_assert(kF8.bits == 8 && kF8.k_block == kTileK && kF8.group_bytes == sizeof(float));

constexpr float kF8Unit = 256;  // load_f8 takes the exponent of FP8 for float16's

// Four k of FP8, over kF8Unit.
struct PanelF8 {
  static constexpr int64_t kPerLine = F8::kLineK;
  static constexpr int64_t kBytes = kQuantLine;

  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, int column) {
    constexpr int kTwo = 2 * S::kWidth;  // numbers of two vectors begin to be widened together
    const int64_t at = kK * kPanel + column;
    return S::load_f8(line + at / kTwo * kTwo, at % kTwo > 0);
  }
};

template <typename Format>
constexpr bool reads(const WeightFormat& format) {
  if (format.bits != Format::kBits) return false;
  if constexpr (requires { Format::kValues; }) {
    constexpr int64_t kHalves = Format::kValues * int64_t{sizeof(uint16_t)};
    if constexpr (Format::kUnits)
      return std::ranges::all_of(format.groups, [](int64_t g) { return g == 0 || g >= Format::kShortestGroup; }) &&
             format.group_bytes == Format::kValues && format.unit_bytes == kHalves && format.k_block == kUnitK;
    return format.group_bytes == kHalves && format.k_block == 2 * kTileK;
  }
  if constexpr (requires { Format::kTiles; }) return format.k_block == Format::kTiles * kTileK;
  return false;
}
static_assert(reads<W8>(kW8) && reads<W4>(kW4) && reads<W2t>(kW2t) && reads<W3t>(kW3t) && reads<W4t<false>>(kW4t) &&
              reads<W4t<true>>(kW4ts) && reads<W8t<false>>(kW8t) && reads<W8t<true>>(kW8ts) && reads<W2ks>(kW2ks) &&
              reads<W3k>(kW3k) && reads<W4ks>(kW4ks) && reads<W5ks>(kW5ks) && reads<W6k>(kW6k));

inline const float* panel_scales(const std::byte* panel) { return reinterpret_cast<const float*>(panel); }
// w4t: the values of its codes; w4ts, w8ts: whether shifts are offsets.
inline const int8_t* panel_table(const std::byte* panel) { return reinterpret_cast<const int8_t*>(panel + 64); }
inline bool panel_has_offsets(const std::byte* panel) { return panel[80] != std::byte{0}; }
// Whether values have further bits: int8, each worth kMoreUnit of theirs.
inline bool panel_has_more_bits(const std::byte* panel) { return panel[81] == std::byte{1}; }
inline const int8_t* panel_more_bits(const std::byte* panel) { return reinterpret_cast<const int8_t*>(panel + 96); }
constexpr float kMoreUnit = 1.0f / 256;
inline const int32_t* panel_sums(const std::byte* panel) { return reinterpret_cast<const int32_t*>(panel + 64); }

// Lines of int8 → twice as many of bf16: pairs of k of 16 columns, exact.
template <typename I>
void narrow_lines(const std::byte* lines, int64_t count, std::byte* to) {
  for (int64_t l = 0; l < count; ++l, lines += kQuantLine, to += 2 * kQuantLine)
    for (int64_t i = 0; i < 16; i += I::kWidth) {
      const std::byte* quads = lines + i * 4;
      I::store_bf16_pairs(to + i * 4, I::template load_quads<0>(quads), I::template load_quads<1>(quads));
      I::store_bf16_pairs(to + kQuantLine + i * 4, I::template load_quads<2>(quads), I::template load_quads<3>(quads));
    }
}

}  // namespace
}  // namespace ingot
