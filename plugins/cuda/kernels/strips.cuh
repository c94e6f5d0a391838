// How a thread that multiplies few rows of x reads its rows of a weight of codes: in strips of 128 columns, whose four
// slabs share addresses and what is computed from the scale of a group, and neighbouring rows of a panel at once. The
// numbers are those that `value` of weight_rows.cuh and kept_rows.cuh makes, bit for bit.
//
// A kernel calls `load` for each slab of a strip, early, into one of kStrips places, and `load_group` for each slab of
// its first strip. Then it gives `choose` a function, which gets a strip with the way to the numbers that the panels
// take. For each slab in order the function calls `begin` of that strip, and `values` for the two rows of each half.
// Behind `values` the place of the slab is free. Slabs from `end` on, where the kernel's part of K ends, may have any
// numbers that are finite. kTogether: neighbouring rows that a lane computes.
#pragma once

#include "kept_rows.cuh"

constexpr int kStripSlabs = 4;

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

struct alignas(8) TwoWords {
  uint32_t words[2];  // of two neighbouring rows
};

// Whether a group begins at a slab of a strip. eights: a group has two to the power of so many times eight columns.
INGOT_DEVICE bool begins_group(int slab, int eights) { return eights < 3 || (slab & ((1 << (eights - 2)) - 1)) == 0; }

// The panels of a block. Where the second one would lie behind the weight, the first one stands for it: its sums are
// not stored.
struct Panels {
  const unsigned char* first;
  int next;  // bytes from there to the second one

  // top: 0 or 16, where the block's rows begin in the pair.
  INGOT_DEVICE Panels(const void* weight, const Sizes& of, int pair, int top, int64_t bytes) {
    const int number = 2 * pair + top / 16, last = panels_of(of) - 1;
    first = static_cast<const unsigned char*>(weight) + min(number, last) * bytes;
    next = number < last ? static_cast<int>(bytes) : 0;
  }
  INGOT_DEVICE const unsigned char* at(int half) const { return half ? first + next : first; }
};

// Of w8 and w4 lane i computes rows 2 * (i / 4) and 2 * (i / 4) + 1 of each panel, and so of kept codes in groups.
INGOT_DEVICE int column_of_lane() { return threadIdx.x % kWarp / 4 * 2; }

template <int kHalves>
struct StripW8 {
  static constexpr int kTogether = 2, kStrips = 2 / kHalves;
  struct Raw {
    TwoWords words[kStripSlabs][kHalves][2];
  };

  Panels panels;
  int codes;  // where the lane's begin in a panel

  INGOT_DEVICE StripW8(const void* weight, const Sizes& of, int pair, int top)
      : panels(weight, of, pair, top, RowW8<true>::panel_bytes(of)),
        codes(kPanelHeader + (threadIdx.x % 4 * 32 + column_of_lane()) * 4) {}
  INGOT_DEVICE void load(Raw& raw, int strip, int slab, int end) const {
    if (strip * kStripSlabs + slab / 2 * 2 >= end) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + (codes + strip * 2048) + slab * 512;
#pragma unroll
      for (int i = 0; i < 2; ++i) raw.words[slab][half][i] = *reinterpret_cast<const TwoWords*>(from + 64 * i);
    }
  }
  INGOT_DEVICE void load_group(int, int, int) {}
  template <class Use>
  INGOT_DEVICE void choose(Use use) {
    use(*this);
  }
  INGOT_DEVICE void begin(int, int, int) {}
  INGOT_DEVICE void values(Eight (&to)[2], const Raw& raw, int slab, int half) const {
    const TwoWords(&words)[2] = raw.words[slab][half];
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = RowW8<true>::value({{words[0].words[i], words[1].words[i]}});
  }
};

template <int kHalves>
struct StripW4 {
  static constexpr int kTogether = 2, kStrips = 4 / kHalves;
  struct Raw {
    TwoWords words[2][kHalves][2];  // of slabs 0 and 2, of slabs 1 and 3
  };

  Panels panels;
  int codes, groups;                           // where the lane's begin in a panel
  int group_shift;                             // of a slab's number
  uint32_t multipliers[kStripSlabs][kHalves];  // two bytes, of the slabs that begin groups, for `begin`
  uint32_t factor[2 * kHalves], less[2 * kHalves];

  INGOT_DEVICE StripW4(const void* weight, const Sizes& of, int pair, int top)
      : panels(weight, of, pair, top, RowW4<true>::panel_bytes(of)),
        codes(kPanelHeader + RowW4<true>::group_bytes(of) + (threadIdx.x % 4 * 32 + column_of_lane()) * 4),
        groups(kPanelHeader + column_of_lane()),
        group_shift(RowW4<true>::shift_of_group(of)) {}
  // Whole strips, which panels have.
  INGOT_DEVICE void load(Raw& raw, int strip, int slab, int end) const {
    if (slab < 2 || strip * kStripSlabs >= end) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + (codes + strip * 1024) + slab % 2 * 512;
#pragma unroll
      for (int i = 0; i < 2; ++i) raw.words[slab % 2][half][i] = *reinterpret_cast<const TwoWords*>(from + 64 * i);
    }
  }
  template <class Use>
  INGOT_DEVICE void choose(Use use) {
    use(*this);
  }
  INGOT_DEVICE void begin(int strip, int slab, int end) {
    if (!begins_group(slab, group_shift + 2)) return;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      RowW4<true>::factors(factor[i], less[i], multipliers[slab][i / 2] >> 8 * (i % 2));
    }
    load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const Raw& raw, int slab, int half) const {
    const TwoWords(&words)[2] = raw.words[slab % 2][half];
    const int high = slab / 2 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t of_row[2] = {words[0].words[i] >> high, words[1].words[i] >> high};
      to[i] = RowW4<true>::numbers(of_row, factor[2 * half + i], less[2 * half + i]);
    }
  }
  INGOT_DEVICE void load_group(int strip, int slab, int end) {
    if (!begins_group(slab, group_shift + 2) || strip * kStripSlabs >= end) return;
    const int from = groups + (strip * kStripSlabs + slab >> group_shift) * 16;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      multipliers[slab][half] = *reinterpret_cast<const uint16_t*>(panels.at(half) + from);
    }
  }
};

// Kept codes in groups.
template <class Codes, bool kShifts, int kHalves>
struct GroupStrip {
  using Row = GroupRow<true, Codes, kShifts>;
  static constexpr int kTogether = 2;
  static constexpr int kStrips = (Codes::kStored == 1 && !kShifts ? 4 : 2) / kHalves;  // what registers allow
  struct Raw {
    TwoWords words[kStripSlabs][kHalves][Codes::kStored];
  };
  struct Group {
    uint32_t scales, shifts;  // float16 of two rows
  };

  Panels panels;
  int codes, groups;  // where the lane's begin in a panel
  int eights;
  Group next[kStripSlabs][kHalves];  // of the slabs that begin groups, for `begin`

  INGOT_DEVICE GroupStrip(const void* weight, const Sizes& of, int pair, int top)
      : panels(weight, of, pair, top, Row::panel_bytes(of)),
        codes(kPanelHeader + Row::group_bytes(of) + Codes::place(0, threadIdx.x % 4) + column_of_lane() * 4),
        groups(kPanelHeader + column_of_lane() * 2),
        eights(Row::eights_of(of)) {}
  INGOT_DEVICE void load(Raw& raw, int strip, int slab, int end) const {
    if (strip * kStripSlabs >= end) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + (codes + strip * 256 * Codes::kBits) + slab * 64 * Codes::kBits;
#pragma unroll
      for (int i = 0; i < Codes::kStored; ++i) {
        const int behind = Codes::place(i, threadIdx.x % 4) - Codes::place(0, threadIdx.x % 4);
        raw.words[slab][half][i] = *reinterpret_cast<const TwoWords*>(from + behind);
      }
    }
  }
  INGOT_DEVICE void load_group(int strip, int slab, int end) {
    if (!begins_group(slab, eights) || strip * kStripSlabs >= end) return;
    const int number = (strip * kStripSlabs + slab) * 4 + threadIdx.x % 4 >> eights;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned char* from = panels.at(half) + (groups + number * Row::kGroupLine);
      next[slab][half].scales = *reinterpret_cast<const uint32_t*>(from);
      if constexpr (kShifts) next[slab][half].shifts = *reinterpret_cast<const uint32_t*>(from + 32);
    }
  }
  // All threads of the block choose the same: they have the same panels.
  template <class Use>
  INGOT_DEVICE void choose(Use use);
  INGOT_DEVICE static uint16_t of_row(uint32_t two, int i) { return static_cast<uint16_t>(two >> 16 * (i % 2)); }
};

// Its numbers as the specification has them.
template <class Codes, bool kShifts, int kHalves>
struct AnyGroupStrip : GroupStrip<Codes, kShifts, kHalves> {
  using Strip = GroupStrip<Codes, kShifts, kHalves>;

  typename Strip::Group group[kHalves];

  INGOT_DEVICE explicit AnyGroupStrip(const Strip& strip) : Strip(strip) {}
  INGOT_DEVICE void begin(int strip, int slab, int end) {
    if (!begins_group(slab, this->eights)) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) group[half] = this->next[slab][half];
    this->load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const typename Strip::Raw& raw, int slab, int half) const {
    const typename Strip::Row row = Strip::Row::of_panel(this->panels.at(half));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      typename Strip::Row::Raw one;
#pragma unroll
      for (int word = 0; word < Codes::kWords; ++word) one.words[word] = raw.words[slab][half][word].words[i];
      one.scale = Strip::of_row(group[half].scales, i);
      if constexpr (kShifts) one.scale |= static_cast<uint32_t>(Strip::of_row(group[half].shifts, i)) << 16;
      to[i] = row.value(one);
    }
  }
};

// By a shorter way.
template <class Way, bool kShifts, int kHalves>
struct ShortGroupStrip : GroupStrip<TableCodes, kShifts, kHalves> {
  using Strip = GroupStrip<TableCodes, kShifts, kHalves>;

  float first[kHalves];
  uint32_t table[4];
  Way ways[2 * kHalves];

  INGOT_DEVICE explicit ShortGroupStrip(const Strip& strip) : Strip(strip) {
    TableCodes::of(this->panels.first).less_sixty_four(table);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) first[half] = TableCodes::of(this->panels.at(half)).first();
  }
  INGOT_DEVICE void begin(int strip, int slab, int end) {
    if (!begins_group(slab, this->eights)) return;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const typename Strip::Group& group = this->next[slab][i / 2];
      const float shift = kShifts ? f16_to_float(Strip::of_row(group.shifts, i)) : 0.f;
      ways[i] = Way::of(f16_to_float(Strip::of_row(group.scales, i)), shift, first[i / 2]);
    }
    this->load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const typename Strip::Raw& raw, int slab, int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = ways[2 * half + i].numbers(raw.words[slab][half][0].words[i], table);
  }
};

// Of two and three bits.
template <int kBits, int kHalves>
struct FewGroupStrip : GroupStrip<FewCodes<kBits>, false, kHalves> {
  using Codes = FewCodes<kBits>;
  using Strip = GroupStrip<Codes, false, kHalves>;

  float number[kHalves][4 * Codes::kTable];  // of the panels' tables
  FewWay<kBits> ways[2 * kHalves];

  INGOT_DEVICE explicit FewGroupStrip(const Strip& strip) : Strip(strip) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) Codes::of(this->panels.at(half)).numbers(number[half]);
  }
  INGOT_DEVICE void begin(int strip, int slab, int end) {
    if (!begins_group(slab, this->eights)) return;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const uint16_t scale = Strip::of_row(this->next[slab][i / 2].scales, i);
      ways[i] = FewWay<kBits>::of(number[i / 2], f16_to_float(scale));
    }
    this->load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const typename Strip::Raw& raw, int slab, int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t stored[Codes::kStored], words[1];
#pragma unroll
      for (int word = 0; word < Codes::kStored; ++word) stored[word] = raw.words[slab][half][word].words[i];
      Codes::unpack(words, stored, threadIdx.x % 4);
      to[i] = ways[2 * half + i].numbers(words[0]);
    }
  }
};

template <class Codes, bool kShifts, int kHalves>
template <class Use>
INGOT_DEVICE void GroupStrip<Codes, kShifts, kHalves>::choose(Use use) {
  if constexpr (Codes::kBits < 4) {
    return use(FewGroupStrip<Codes::kBits, kHalves>(*this));
  } else if constexpr (Codes::kBits == 4) {
    const Row row = Row::of_panel(panels.at(0)), other = Row::of_panel(panels.at(kHalves - 1));
    const PanelWay way = row.way();
    if (way == other.way()) {
      if (way == PanelWay::kShort) return use(ShortGroupStrip<ShortWay, kShifts, kHalves>(*this));
      if constexpr (kShifts) {
        if (way == PanelWay::kOffset) return use(ShortGroupStrip<OffsetWay, kShifts, kHalves>(*this));
      } else if (way == PanelWay::kTable && row.codes.has_table_of(other.codes)) {
        return use(ShortGroupStrip<TableWay, kShifts, kHalves>(*this));
      }
    }
  }
  if constexpr (Codes::kBits >= 4) use(AnyGroupStrip<Codes, kShifts, kHalves>(*this));
}

// FP8. A panel's 16 rows of one k lie side by side, so a lane computes neighbouring rows: four of one panel, lanes 0 to
// 15 of the first one and the others of the second one; or two, if the block computes one panel.
template <int kHalves>
struct StripF8 {
  static constexpr int kStrips = 1, kRows = 2 * kHalves, kTogether = kRows;
  struct Raw {
    uint32_t words[kStripSlabs][2][4];  // of each k, the rows' bytes
  };

  const unsigned char* panel;
  int codes, groups;                                   // where the lane's begin in it
  int eights;                                          // 0: there are no groups
  float next[kStripSlabs][kRows] = {}, scales[kRows];  // as above

  INGOT_DEVICE StripF8(const void* weight, const Sizes& of, int pair, int top) : eights(RowF8<true>::eights_of(of)) {
    const int row = threadIdx.x % kWarp / 4 * kRows;
    panel = Panels(weight, of, pair, top, RowF8<true>::panel_bytes(of)).at(row / 16);
    codes = kPanelHeader + RowF8<true>::group_bytes(of) + threadIdx.x % 4 * 128 + row % 16;
    groups = kPanelHeader + row % 16 * 4;
  }
  INGOT_DEVICE void load(Raw& raw, int strip, int slab, int end) const {
    if (strip * kStripSlabs + slab / 2 * 2 >= end) return;
    const unsigned char* from = panel + (codes + strip * 2048) + slab * 512;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (kRows == 4) {
        raw.words[slab][k / 4][k % 4] = *reinterpret_cast<const uint32_t*>(from + 16 * k);
      } else {
        raw.words[slab][k / 4][k % 4] = *reinterpret_cast<const uint16_t*>(from + 16 * k);
      }
    }
  }
  template <class Use>
  INGOT_DEVICE void choose(Use use) {
    use(*this);
  }
  INGOT_DEVICE void begin(int strip, int slab, int end) {
    if (eights == 0 || !begins_group(slab, eights)) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) scales[i] = next[slab][i];
    load_group(strip + 1, slab, end);
  }
  INGOT_DEVICE void values(Eight (&to)[2], const Raw& raw, int slab, int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i] = RowF8<true>::widened_row(raw.words[slab], 2 * half + i);
      if (eights) to[i] = RowF8<true>::scaled(to[i], scales[2 * half + i]);
    }
  }
  INGOT_DEVICE void load_group(int strip, int slab, int end) {
    if (eights == 0 || !begins_group(slab, eights) || strip * kStripSlabs + slab / 2 * 2 >= end) return;
    const int number = (strip * kStripSlabs + slab) * 4 + threadIdx.x % 4 >> eights;
    const float* from = reinterpret_cast<const float*>(panel + (groups + number * 64));
#pragma unroll
    for (int i = 0; i < kRows; ++i) next[slab][i] = from[i];
  }
};
#endif
