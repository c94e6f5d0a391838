// Strips of few rows (strips.cuh) of codes whose scales are whole numbers of units. Two strips share units.
#pragma once

#include "strips.cuh"
#include "unit_rows.cuh"

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

template <int kBits, bool kOffsets, int kHalves>
struct UnitStrip {
  using Row = UnitRow<true, kBits, kOffsets>;
  using Codes = typename Row::Codes;
  static constexpr int kTogether = 2, kStrips = 2 / kHalves;
  struct Raw {
    TwoWords words[kStripSlabs][kHalves][Codes::kStored];
  };

  Panels panels;
  int codes, column;  // where the lane's codes begin in a panel; its first row of the panel
  int eights;
  uint32_t next[kStripSlabs][kHalves];          // numbers of scales, bytes of two rows, of the slabs, for `begin`
  uint32_t next_offsets[kStripSlabs][kHalves];  // the same of offsets, of two neighbouring groups of each row
  uint32_t next_units[kHalves][Row::kNumbers];  // float16 of two rows, of the strip
  Unit<kOffsets> units[2 * kHalves][Row::kNumbers];
  Codes ways[2 * kHalves];

  INGOT_DEVICE UnitStrip(const void* weight, const Sizes& of, int pair, int top)
      : panels(weight, of, pair, top, Row::panel_bytes(of)),
        codes(kPanelHeader + Row::group_bytes(of) + Codes::place(0, threadIdx.x % 4) + column_of_lane() * 4),
        column(column_of_lane()),
        eights(Row::eights_of(of)) {}
  INGOT_DEVICE void load(Raw& raw, int strip, int slab, int end) const {
    if (strip * kStripSlabs >= end) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + (codes + strip * 256 * kBits) + slab * 64 * kBits;
#pragma unroll
      for (int i = 0; i < Codes::kStored; ++i) {
        const int behind = Codes::place(i, threadIdx.x % 4) - Codes::place(0, threadIdx.x % 4);
        raw.words[slab][half][i] = *reinterpret_cast<const TwoWords*>(from + behind);
      }
    }
  }
  INGOT_DEVICE void load_group(int strip, int slab, int end) {
    if (strip * kStripSlabs >= end) return;
    const int group = strip % 2 * 16 + slab * 4 + threadIdx.x % 4 >> eights;
    const int block = kPanelHeader + strip / 2 * Row::block_bytes(eights);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + block;
      const unsigned char* numbers = from + Row::kUnits;
      if (slab == 0) {
#pragma unroll
        for (int i = 0; i < Row::kNumbers; ++i) {
          next_units[half][i] = *reinterpret_cast<const uint32_t*>(from + 32 * i + column * 2);
        }
      }
      next[slab][half] = *reinterpret_cast<const uint16_t*>(numbers + group * 16 + column);
      if (kOffsets && pair_of(slab) == slab) {
        const unsigned char* offsets = numbers + Row::numbers_bytes(eights) + group / 2 * 32;
        next_offsets[slab][half] = *reinterpret_cast<const uint32_t*>(offsets + column * 2);
      }
    }
  }
  // With which slab's group the offsets of a slab come: two slabs share them, where a slab has one group.
  INGOT_DEVICE static constexpr int pair_of(int slab) { return kBits < 4 ? slab : slab | 1; }
  template <class Use>
  INGOT_DEVICE void choose(Use use) {
    use(*this);
  }
  INGOT_DEVICE void begin(int strip, int slab, int end) {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      if (slab == 0) {
#pragma unroll
        for (int of = 0; of < Row::kNumbers; ++of) {
          units[i][of] = Unit<kOffsets>::of(static_cast<uint16_t>(next_units[i / 2][of] >> 16 * (i % 2)));
        }
      }
      const int second = kBits < 4 ? threadIdx.x % 4 / 2 : slab % 2;  // of two groups
      const float scale = units[i][0].times(next[slab][i / 2] ^ kSigns, i % 2);
      const uint32_t offsets = kOffsets ? next_offsets[pair_of(slab)][i / 2] : 0;
      const float offset = kOffsets ? units[i][Row::kNumbers - 1].times(offsets ^ kSigns, i % 2 * 2 + second) : 0.f;
      ways[i] = Codes::of(scale, offset);
    }
    load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const Raw& raw, int slab, int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t stored[Codes::kStored], words[Codes::kWords];
#pragma unroll
      for (int word = 0; word < Codes::kStored; ++word) stored[word] = raw.words[slab][half][word].words[i];
      Codes::unpack(words, stored, threadIdx.x % 4);
      to[i] = ways[2 * half + i].numbers(words);
    }
  }
};

#endif
