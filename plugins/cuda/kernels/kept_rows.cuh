// Rows that keep the codes of a quantised checkpoint: eight neighbouring k of some rows, from each of these formats.
// Codes become numbers that bf16 holds exactly; where a table has numbers of more than eight bits, they are rounded to
// it. What groups of columns have multiplies sums. `plugins/weight_values.py` specifies the same, and
// `plugins/layouts.py` defines the panels.
#pragma once

#include "weight_rows.cuh"

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

// How codes of four bits become numbers. A word has eight of a row, in the order k 0 4 1 5 2 6 3 7: k and k + 4 are the
// low and the high bits of a byte. Most tables are those of whole numbers that follow each other, or of FP4.
struct TableCodes {
  enum Kind { kFollow, kFp4, kAny };

  Kind kind;
  uint32_t less;             // twice the first number - 128
  const Neighbours<4>* any;  // of any: 16 lower bytes of the numbers in bf16, then 16 upper ones

  INGOT_DEVICE static TableCodes of(const unsigned char* panel) {
    TableCodes found;
    const uint32_t* table = reinterpret_cast<const uint32_t*>(panel + 64);
    const uint32_t first = table[0] ^ kSigns;
    const bool follow = first == (first & 0xffu) * 0x01010101u + 0x03020100u &&
                        (table[1] ^ kSigns) == first + 0x04040404u && (table[2] ^ kSigns) == first + 0x08080808u &&
                        (table[3] ^ kSigns) == first + 0x0c0c0c0cu;
    const bool fp4 =
        table[0] == 0x03020100u && table[1] == 0x0c080604u && table[2] == 0xfdfeff00u && table[3] == 0xf4f8fafcu;
    found.kind = panel[81] ? kAny : follow ? kFollow : fp4 ? kFp4 : kAny;
    const float offset = static_cast<float>(static_cast<int>(first & 0xffu)) - 256;
    found.less = pack_two<BF16>(offset, offset);
    return found;
  }
  // Of any: its numbers to 32 bytes of shared memory, if this thread writes them.
  INGOT_DEVICE void share(const unsigned char* panel, Neighbours<4>* to, bool writes) {
    any = to;
    if (kind != kAny || !writes) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t table = reinterpret_cast<const uint32_t*>(panel + 64)[i];
      const uint32_t rest = panel[81] ? reinterpret_cast<const uint32_t*>(panel + 96)[i] : 0;
      uint32_t two[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float number[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int which = 2 * half + j;
          number[j] = fmaf(signed_byte(rest, which), 1.f / 256, signed_byte(table, which));  // exact
        }
        two[half] = pack_two<BF16>(number[0], number[1]);
      }
      to[0].at[i] = __byte_perm(two[0], two[1], 0x6420);
      to[1].at[i] = __byte_perm(two[0], two[1], 0x7531);
    }
  }
  template <int kRows>
  INGOT_DEVICE void values(Eight (&to)[kRows], const uint32_t (&words)[kRows]) const {
    if (kind == kAny) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) look_up(to[r], words[r]);
    } else if (kind == kFollow) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t word = in_order(words[r]);
        to[r].words[0] = nibbles_to_bf16(word, less);
        to[r].words[1] = nibbles_to_bf16(word >> 8, less);
        to[r].words[2] = nibbles_to_bf16(word >> 4, less);
        to[r].words[3] = nibbles_to_bf16(word >> 12, less);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t word = in_order(words[r]);
        to[r].words[0] = fp4_to_bf16(word << 6, word << 12);
        to[r].words[1] = fp4_to_bf16(word >> 2, word << 4);
        to[r].words[2] = fp4_to_bf16(word << 2, word << 8);
        to[r].words[3] = fp4_to_bf16(word >> 6, word);
      }
    }
  }
  // k 0 4 2 6 1 5 3 7: neighbours are halves apart.
  INGOT_DEVICE static uint32_t in_order(uint32_t word) { return __byte_perm(word, 0, 0x3120); }
  // Twice E2M1, whose sign is a bit of one word, and whose other bits lie in another one where bf16 has the last bits
  // of the exponent and the first one behind the point: that is the number times 2^-127.
  INGOT_DEVICE static uint32_t fp4_to_bf16(uint32_t bits, uint32_t signs) {
    return fused_bf16(and_or(signs, 0x80008000u, bits & 0x01c001c0u), 0x7f007f00u, 0x80008000u);
  }
  // A code's upper bit chooses the half of the table.
  INGOT_DEVICE void look_up(Eight& to, uint32_t word) const {
    const Neighbours<4> low = any[0], high = any[1];
    const uint32_t places = word & 0x77777777u, halves = (word >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t bytes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t which = places >> 16 * i, half = halves >> 16 * i;
      bytes[i][0] =
          __byte_perm(__byte_perm(low.at[0], low.at[1], which), __byte_perm(low.at[2], low.at[3], which), half);
      bytes[i][1] =
          __byte_perm(__byte_perm(high.at[0], high.at[1], which), __byte_perm(high.at[2], high.at[3], which), half);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to.words[i] = __byte_perm(bytes[i][0], bytes[i][1], 0x6240);
      to.words[2 + i] = __byte_perm(bytes[i][0], bytes[i][1], 0x7351);
    }
  }
};

// Codes of a table. A line holds eight k of the panel's 16 rows.
template <int kOfLane>
struct TableLines {
  static constexpr int kBits = 4, kRows = kOfLane;
  static constexpr bool kTables = true;
  struct Raw {
    uint32_t words[kRows];
  };

  TableCodes codes;

  INGOT_DEVICE static TableLines of(const unsigned char* panel) { return {TableCodes::of(panel)}; }
  INGOT_DEVICE void share(const unsigned char* panel, Neighbours<4>* to, bool writes) {
    codes.share(panel, to, writes);
  }
  INGOT_DEVICE static Raw load(const unsigned char* lines, int slab, int quarter) {
    Raw raw;
    const auto words = stream<kRows>(lines + slab * 256 + quarter * 64);
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw.words[r] = words.at[r];
    return raw;
  }
  INGOT_DEVICE void values(Eight (&to)[kRows], const Raw& raw) const { codes.values(to, raw.words); }
};

// Signed bytes.
template <int kOfLane>
struct PlainLines : ByteLines<kOfLane> {
  static constexpr int kBits = 8, kRows = kOfLane;
  static constexpr bool kTables = false;

  INGOT_DEVICE static PlainLines of(const unsigned char*) { return {}; }
  INGOT_DEVICE static void share(const unsigned char*, Neighbours<4>*, bool) {}
};

// Groups of 16 to 128 columns have a float16 scale, and where kHasShifts a shift behind the scales of a panel's rows: a
// zero point, or an offset. A number is (value - zero point) * scale, or value * scale + offset.
template <class Lines, bool kWideRows, bool kHasShifts>
struct GroupRows : PanelRows<GroupRows<Lines, kWideRows, kHasShifts>, Lines::kRows> {
  static constexpr int kRows = Lines::kRows;
  static constexpr bool kWide = kWideRows, kScaled = true, kGrouped = true, kShifts = kHasShifts;
  static constexpr bool kTables = Lines::kTables;
  static constexpr int kShare = 2;
  static constexpr int kAhead = kWide ? ((Lines::kBits == 4 ? 16 : 12) - 4 * kShifts) / kRows : 1, kPiece = 1;
  static constexpr int kGroupBytes = kShifts ? 64 : 32;  // of a panel
  using Raw = typename Lines::Raw;
  using Piece = Raw;
  struct RawGroup {
    uint32_t words[(kShifts ? 2 : 1) * ((kRows + 1) / 2)];  // float16: scales, then shifts
  };

  Lines codes;
  const unsigned char* groups;
  const unsigned char* lines;
  int eights;  // a group has two to the power of so many times eight columns
  bool offsets;

  INGOT_DEVICE static GroupRows at(const void* weight, const Sizes& of, int pair, int i) {
    const unsigned char* panel = panel_at(weight, of, panel_bytes(of), pair, i);
    GroupRows found;
    found.codes = Lines::of(panel);
    found.groups = panel + kPanelHeader + i % 16 * 2;
    found.lines = panel + kPanelHeader + group_bytes(of) + i % 16 * 4;
    found.eights = 1 + (of.group > 16) + (of.group > 32) + (of.group > 64);
    found.offsets = kShifts && panel[80] != 0;
    return found;
  }
  // Before codes are converted: to shared memory what conversions take from there. One thread writes it for a panel.
  INGOT_DEVICE void share(Neighbours<4>* to, bool writes, const void* weight, const Sizes& of, int pair, int i) {
    codes.share(panel_at(weight, of, panel_bytes(of), pair, i), to, writes);
  }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return ((slabs(of.k) * kSlab + of.group - 1) / of.group * kGroupBytes + 63) / 64 * 64;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 2 * Lines::kBits;
  }
  INGOT_DEVICE static int slabs(int k) { return (k + 127) / 128 * 4; }
  INGOT_DEVICE static bool halves(const Sizes& of) { return of.group == 16; }
  INGOT_DEVICE Raw load(int slab, int quarter) const { return codes.load(lines, slab, quarter); }
  INGOT_DEVICE Piece load_piece(int piece, int quarter) const { return load(piece, quarter); }
  INGOT_DEVICE static const Raw& slab_of(const Piece& piece, int) { return piece; }
  INGOT_DEVICE void values(Eight (&to)[kRows], const Raw& raw) const { codes.values(to, raw); }
  INGOT_DEVICE RawGroup load_group(int slab, int quarter, int further = 0) const {
    constexpr int kWords = (kRows + 1) / 2;
    const unsigned char* from = groups + 2 * further + (4 * slab + quarter >> eights) * kGroupBytes;
    RawGroup raw;
    const auto scales = Bytes<2 * kRows>::load(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.words[i] = scales.words[i];
    if constexpr (kShifts) {
      const auto shifts = Bytes<2 * kRows>::load(from + 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) raw.words[kWords + i] = shifts.words[i];
    }
    return raw;
  }
  INGOT_DEVICE OfGroup<kRows> of_group(const RawGroup& raw) const {
    const auto half = [&](int i) { return f16_to_float(static_cast<uint16_t>(raw.words[i / 2] >> 16 * (i % 2))); };
    OfGroup<kRows> found;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      found.scale[r] = half(r);
      if constexpr (kShifts) {
        const float shift = half((kRows + 1) / 2 * 2 + r);
        found.shift[r] = __fmul_rn(shift, offsets ? 1.f : -found.scale[r]);  // exact
      }
    }
    return found;
  }
};

template <int kRows, bool kWide>
using RowsW4t = GroupRows<TableLines<kRows>, kWide, false>;
template <int kRows, bool kWide>
using RowsW4ts = GroupRows<TableLines<kRows>, kWide, true>;
template <int kRows, bool kWide>
using RowsW8t = GroupRows<PlainLines<kRows>, kWide, false>;
template <int kRows, bool kWide>
using RowsW8ts = GroupRows<PlainLines<kRows>, kWide, true>;

// Numbers of FP8 (E4M3), of which none is NaN. With groups, of 16 to 128 columns, these have float32 scales. The
// panel's 16 rows of one k lie side by side.
template <int kRows, bool kWideRows>
struct RowsF8 : PanelRows<RowsF8<kRows, kWideRows>, kRows> {
  static constexpr bool kWide = kWideRows, kScaled = true, kGrouped = true, kShifts = false, kTables = false;
  static constexpr int kShare = 2;  // blocks of few rows on a multiprocessor; one less for more than eight rows
  static constexpr int kAhead = kWide ? 8 / kRows : 1, kPiece = 1;
  struct Raw {
    uint32_t words[8];  // of one k each
  };
  using Piece = Raw;
  using RawGroup = Bytes<4 * kRows>;

  const unsigned char* groups;
  const unsigned char* lines;
  int eights;  // as above; 0 without groups

  INGOT_DEVICE static RowsF8 at(const void* weight, const Sizes& of, int pair, int i) {
    const unsigned char* panel = panel_at(weight, of, panel_bytes(of), pair, i) + kPanelHeader;
    RowsF8 found;
    found.groups = panel + i % 16 * 4;
    found.lines = panel + group_bytes(of) + i % 16;
    found.eights = (of.group > 0) + (of.group > 16) + (of.group > 32) + (of.group > 64);
    return found;
  }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return of.group ? (slabs(of.k) * kSlab + of.group - 1) / of.group * 64 : 0;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 16;
  }
  INGOT_DEVICE static int slabs(int k) { return (k + 63) / 64 * 2; }
  INGOT_DEVICE static bool halves(const Sizes& of) { return of.group == 16; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    const unsigned char* from = lines + slab * 512 + quarter * 128;
    Raw raw;
#pragma unroll
    for (int k = 0; k < 8; ++k) raw.words[k] = read_bytes<kRows>(from + 16 * k);
    return raw;
  }
  INGOT_DEVICE Piece load_piece(int piece, int quarter) const { return load(piece, quarter); }
  INGOT_DEVICE static const Raw& slab_of(const Piece& piece, int) { return piece; }
  INGOT_DEVICE static void values(Eight (&to)[kRows], const Raw& raw) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bytes = __byte_perm(raw.words[2 * i], raw.words[2 * i + 1], 0x4400 + 0x1111 * r);  // twice each
        const uint32_t small = and_or(bytes, 0x80008000u, bytes >> 4 & 0x07f007f0u);  // in bf16, times 2^-120
        to[r].words[i] = fused_bf16(small, 0x7b807b80u, 0x80008000u);                 // exact, zeros keep signs
      }
    }
  }
  INGOT_DEVICE RawGroup load_group(int slab, int quarter, int further = 0) const {
    if (eights) return RawGroup::load(groups + 4 * further + (4 * slab + quarter >> eights) * 64);
    RawGroup raw;
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw.words[r] = __float_as_uint(1.f);
    return raw;
  }
  INGOT_DEVICE OfGroup<kRows> of_group(const RawGroup& raw) const {
    OfGroup<kRows> found;
#pragma unroll
    for (int r = 0; r < kRows; ++r) found.scale[r] = __uint_as_float(raw.words[r]);
    return found;
  }
};

// Calls each(name, rows) for the formats of the engine's codes.
#define INGOT_FOR_CODES(each) \
  INGOT_IF_W8(each)           \
  INGOT_IF_W4(each) INGOT_IF_W4T(each) INGOT_IF_W4TS(each) INGOT_IF_W8T(each) INGOT_IF_W8TS(each) INGOT_IF_F8(each)
#ifdef INGOT_CODES_W8
#define INGOT_IF_W8(each) each(w8, RowsW8)
#else
#define INGOT_IF_W8(each)
#endif
#ifdef INGOT_CODES_W4
#define INGOT_IF_W4(each) each(w4, RowsW4)
#else
#define INGOT_IF_W4(each)
#endif
#ifdef INGOT_CODES_W4T
#define INGOT_IF_W4T(each) each(w4t, RowsW4t)
#else
#define INGOT_IF_W4T(each)
#endif
#ifdef INGOT_CODES_W4TS
#define INGOT_IF_W4TS(each) each(w4ts, RowsW4ts)
#else
#define INGOT_IF_W4TS(each)
#endif
#ifdef INGOT_CODES_W8T
#define INGOT_IF_W8T(each) each(w8t, RowsW8t)
#else
#define INGOT_IF_W8T(each)
#endif
#ifdef INGOT_CODES_W8TS
#define INGOT_IF_W8TS(each) each(w8ts, RowsW8ts)
#else
#define INGOT_IF_W8TS(each)
#endif
#ifdef INGOT_CODES_F8
#define INGOT_IF_F8(each) each(f8, RowsF8)
#else
#define INGOT_IF_F8(each)
#endif

#else
#define INGOT_FOR_CODES(each)
#endif
