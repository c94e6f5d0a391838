// Rows that keep the codes of GGUF's K-quants: scales and offsets of groups are whole numbers of a unit, which 256
// columns share. A number is code * scale, or code * scale + offset. `plugins/unit_rows.py` specifies them.
#pragma once

#include "kept_rows.cuh"

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

// strips.cuh
template <int kBits, bool kOffsets, int kHalves>
struct UnitStrip;

// Whole numbers of a unit: the product has 18 bits. kSmall: with one register less, and one instruction more.
template <bool kSmall>
struct Unit {
  float unit, less;

  INGOT_DEVICE static Unit of(uint16_t half) {
    const float unit = f16_to_float(half);
    return {unit, kSmall ? 0.f : __fmul_rn(-kBeside, unit)};  // exact
  }
  // Of signed byte `which`; bytes: of four, their signs turned.
  INGOT_DEVICE float times(uint32_t bytes, int which) const {
    const float beside = beside_byte(bytes, which);
    return kSmall ? __fmul_rn(__fsub_rn(beside, kBeside), unit) : fmaf(beside, unit, less);
  }
};

// Codes from 0 on: a code is kFirst larger. kWords: the bytes of k 0 to 3, and of k 4 to 7.
template <int kCodeBits, bool kOffsets>
struct UnitCodes : PackedLines<kCodeBits> {
  using PackedLines<kCodeBits>::kBits, PackedLines<kCodeBits>::kStored;
  static constexpr int kWords = 2, kFirst = kOffsets ? 0 : -(1 << (kBits - 1));

  float scale, offset;

  INGOT_DEVICE static UnitCodes of(float scale, float offset) {
    UnitCodes found;
    found.scale = scale, found.offset = offset;
    return found;
  }
  INGOT_DEVICE static void unpack(uint32_t (&words)[2], const uint32_t (&stored)[kStored], int eight) {
    if constexpr (kBits == 6) {
      const uint32_t upper = stored[1] >> eight % 2 * 4;
      words[0] = masked_or(stored[0], 0x0f0f0f0fu, upper << 4 & 0x30303030u);
      words[1] = masked_or(stored[0] >> 4, 0x0f0f0f0fu, upper << 2 & 0x30303030u);
    } else if constexpr (kBits == 5) {
      const uint32_t upper = stored[1] >> eight % 4 * 2;
      words[0] = masked_or(stored[0], 0x0f0f0f0fu, upper << 4 & 0x10101010u);
      words[1] = masked_or(stored[0] >> 4, 0x0f0f0f0fu, upper << 3 & 0x10101010u);
    } else if constexpr (kBits == 4) {
      words[0] = stored[0] & 0x0f0f0f0fu, words[1] = stored[0] >> 4 & 0x0f0f0f0fu;
    } else {
      static_assert(kBits == 3);
      const uint32_t low = stored[0] >> eight % 2 * 4, upper = stored[1] >> eight % 4 * 2;
      words[0] = masked_or(low, 0x03030303u, upper << 2 & 0x04040404u);
      words[1] = masked_or(low >> 2, 0x03030303u, upper << 1 & 0x04040404u);
    }
  }
  // 128 + what is stored has its byte in the middle of a float. The difference to the code has six bits at most, and
  // `less` so 24: all but the sum with the offset is exact.
  INGOT_DEVICE Eight numbers(const uint32_t (&words)[2]) const {
    const float less = __fmul_rn(kFirst - 128.f, scale);
    float number[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float beside = __uint_as_float(__byte_perm(words[k / 4], 0x43000000u, 0x7044 + k % 4 * 256));
      number[k] = fmaf(beside, scale, less);
      if constexpr (kOffsets) number[k] = __fadd_rn(number[k], offset);
    }
    return rounded(number);
  }
};

// Of two bits: places of the four numbers that a group has.
template <>
struct UnitCodes<2, true> : FewCodes<2> {
  FewWay<2> way;

  INGOT_DEVICE static UnitCodes of(float scale, float offset) {
    const float number[4] = {offset, __fadd_rn(scale, offset), fmaf(2.f, scale, offset), fmaf(3.f, scale, offset)};
    UnitCodes found;
    found.way = FewWay<2>::of(number);
    return found;
  }
  INGOT_DEVICE Eight numbers(const uint32_t (&words)[1]) const { return way.numbers(words[0]); }
};

template <bool kWideRows, int kCodeBits, bool kOffsets>
struct UnitRow {
  using Codes = UnitCodes<kCodeBits, kOffsets>;
  template <int kHalves>
  using Strip = UnitStrip<kCodeBits, kOffsets, kHalves>;
  static constexpr bool kWide = kWideRows, kScaled = true;
  static constexpr int kBits = kCodeBits, kNumbers = kOffsets ? 2 : 1;
  static constexpr int kStepGroups = 96 * kNumbers;  // bytes of what a panel has of the groups of 64 k, at most
  static constexpr int kUnits = 32 * kNumbers;       // bytes of a panel's units of 256 k
  static constexpr int kUnitEights = 32;
  struct Raw {
    uint32_t words[Codes::kWords];
    float scale, offset;
  };

  const unsigned char* panel;
  int lines;  // where they begin in the panel
  int column;
  int eights;  // a group has two to the power of so many times eight columns
  bool valid;

  INGOT_DEVICE static UnitRow at(const void* weight, const Sizes& of, int pair, int i) {
    const int number = 2 * pair + i / 16;
    const bool valid = number < panels_of(of);
    const unsigned char* panel = static_cast<const unsigned char*>(weight) + (valid ? number : 0) * panel_bytes(of);
    return {panel, kPanelHeader + group_bytes(of), i % 16, eights_of(of), valid};
  }
  // Only one format has groups of both sizes.
  INGOT_DEVICE static int eights_of(const Sizes& of) { return kBits == 6 ? 1 + (of.group > 16) : kBits < 4 ? 1 : 2; }
  // Of what a panel has of 256 k: units of scales, of offsets; numbers of scales, [groups][16]; of offsets, of two
  // groups at a time, [groups / 2][16][2].
  INGOT_DEVICE static int block_bytes(int eights) { return kUnits + numbers_bytes(eights) * kNumbers; }
  INGOT_DEVICE static int numbers_bytes(int eights) { return (kUnitEights >> eights) * 16; }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return (slabs(of.k) / 8 * block_bytes(eights_of(of)) + 63) / 64 * 64;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 2 * kBits;
  }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * panel_bytes(of); }
  INGOT_DEVICE static int slabs(int k) { return (k + 255) / 256 * 8; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    Raw raw{};
    if (!valid) return raw;
    const int eight = 4 * slab + quarter, group = eight % kUnitEights >> eights;
    uint32_t stored[Codes::kStored];
    Codes::load(stored, panel + lines, eight, column);
    Codes::unpack(raw.words, stored, eight);
    const unsigned char* block = panel + kPanelHeader + eight / kUnitEights * block_bytes(eights);
    const uint16_t* units = reinterpret_cast<const uint16_t*>(block) + column;
    raw.scale = Unit<true>::of(units[0]).times(block[kUnits + group * 16 + column] ^ kSigns, 0);
    if constexpr (kOffsets) {
      const unsigned char* offsets = block + kUnits + numbers_bytes(eights);
      raw.offset = Unit<true>::of(units[16]).times(offsets[(group / 2 * 16 + column) * 2 + group % 2] ^ kSigns, 0);
    }
    return raw;
  }
  INGOT_DEVICE static Eight value(const Raw& raw) { return Codes::of(raw.scale, raw.offset).numbers(raw.words); }
  INGOT_DEVICE float scale() const { return valid ? reinterpret_cast<const float*>(panel)[column] : 0.f; }
};

template <bool kWide>
using RowW2ks = UnitRow<kWide, 2, true>;
template <bool kWide>
using RowW3k = UnitRow<kWide, 3, false>;
template <bool kWide>
using RowW4ks = UnitRow<kWide, 4, true>;
template <bool kWide>
using RowW5ks = UnitRow<kWide, 5, true>;
template <bool kWide>
using RowW6k = UnitRow<kWide, 6, false>;

#endif
