// Rows that keep the codes of a quantised checkpoint: eight neighbouring k of a row, from each of these formats. What
// the row's scale multiplies is computed in float32, one rounding for each operation, and then rounded to bf16: both
// factors of the matrix units have that type. `plugins/weight_values.py` specifies the same roundings, and
// `plugins/layouts.py` defines the panels.
#pragma once

#include "weight_rows.cuh"

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

// Numbers of codes are kept with this beside them: 2^15, to which a byte is added without arithmetic, and the 128 by
// which bytes are larger than signed ones. It has nine bits, so that its product with a float16 is exact, and there is
// room for eight bits behind the point.
constexpr float kBeside = 32768 + 128;

// Byte `which` of four.
INGOT_DEVICE float beside_byte(uint32_t bytes, int which) {
  return __uint_as_float(__byte_perm(bytes, 0x47000000u, 0x7404u + 16 * which));
}

// Numbers as the matrix units take them.
INGOT_DEVICE Eight rounded(const float (&numbers)[8]) {
  Eight to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.words[i] = pack_two<BF16>(numbers[2 * i], numbers[2 * i + 1]);
  return to;
}

constexpr uint32_t kSigns = 0x80808080u;  // signed bytes become those from 0 to 255, 128 larger

// What a panel's header says of all its groups, see plugins/short_ways.py.
constexpr uint32_t kScalesOfFewBits = 1, kWholeShifts = 2;

// strips.cuh
template <class Codes, bool kShifts, int kHalves>
struct GroupStrip;
template <int kHalves>
struct StripF8;

// Ways to the numbers of codes of four bits, from 128 + a code in bf16. Which of them a panel takes is known from its
// header. All have the same methods. scale, shift: of the row's group. first: the first number of the table. codes: in
// the order k 0 4 1 5 2 6 3 7.
INGOT_DEVICE uint32_t code_pair(const uint32_t (&bytes)[2], int i) {
  return masked_or(bytes[i % 2] >> i / 2 * 4, 0x000f000fu, kBias);
}

// (code - zero point) * scale, of tables that are whole numbers in order, as those of AWQ, GPTQ and Q4_0, and whole
// zero points: the difference has at most five bits. A float16 scale has 11, of which `high` gets eight, rounded, and
// `low` what is left, at most two. So difference * low is exact in bf16, and the sum
// difference * high + difference * low is rounded once.
struct ShortWay {
  uint32_t high, low, less;  // twice each; less: from 128 + a code to the difference

  INGOT_DEVICE static ShortWay of(float scale, float shift, float first) {
    ShortWay found;
    found.high = pack_two<BF16>(scale, scale);
    const float rest = __fsub_rn(scale, __uint_as_float(found.high << 16)), less = first - 128.f - shift;
    found.low = pack_two<BF16>(rest, rest);
    found.less = pack_two<BF16>(less, less);
    return found;
  }
  INGOT_DEVICE Eight numbers(uint32_t codes, const uint32_t (&)[4]) const {
    const uint32_t bytes[2] = {two_bytes(codes, 0), two_bytes(codes, 1)};
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t difference = fused_bf16(code_pair(bytes, i), 0x3f803f80u, less);
      found.words[i] = fused_bf16(difference, high, fused_bf16(difference, low, 0x80008000u));
    }
    return found;
  }
};

// code * scale + offset, of such tables: the product is exact in float32. The sum is rounded to float32 once, as the
// specification has it.
struct OffsetWay {
  uint32_t less;  // twice: from 128 + a code to its number
  float scale, offset;

  INGOT_DEVICE static OffsetWay of(float scale, float shift, float first) {
    return {pack_two<BF16>(first - 128.f, first - 128.f), scale, shift};
  }
  INGOT_DEVICE Eight numbers(uint32_t codes, const uint32_t (&)[4]) const {
    const uint32_t bytes[2] = {two_bytes(codes, 0), two_bytes(codes, 1)};
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = fused_bf16(code_pair(bytes, i), 0x3f803f80u, less);
      const float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
      found.words[i] = pack_two<BF16>(fmaf(low, scale, offset), fmaf(high, scale, offset));
    }
    return found;
  }
};

// number * scale, of tables of whole numbers from -64 to 63 and scales of at most six bits, as those of MXFP4 and
// NVFP4: both 192 + a number, which has eight bits, and -192 * scale are exact in bf16, so that their fma is
// number * scale, rounded once.
struct TableWay {
  uint32_t factor, less;  // twice each: the scale, and it times -192

  INGOT_DEVICE static TableWay of(float scale, float, float) {
    const uint32_t factor = pack_two<BF16>(scale, scale);
    return {factor, fused_bf16(factor, 0xc340c340u, 0)};
  }
  // table: 64 + the numbers.
  INGOT_DEVICE Eight numbers(uint32_t codes, const uint32_t (&table)[4]) const;
};

enum class PanelWay { kAny, kShort, kOffset, kTable };

// Codes. kStored: words that hold eight codes of a row; kWords: what `unpack` makes of them, for `numbers`. `place`:
// where word `i` of quarter `quarter` lies in the lines of a slab, in bytes.

// Codes of four bits, in the order k 0 4 1 5 2 6 3 7, which are places of a table of 16 bytes.
struct TableCodes {
  static constexpr int kBits = 4, kStored = 1, kWords = 1, kBlock = 128;

  uint32_t table[4];
  bool more;  // numbers have more bits

  INGOT_DEVICE TableCodes of_eight_bits() const { return {{table[0], table[1], table[2], table[3]}, false}; }
  // Whether the table holds 16 whole numbers in order, the first of them from -8 to 0.
  INGOT_DEVICE bool in_order() const {
    const uint32_t first = table[0] & 0xff, from = first * 0x01010101u + 0x03020100u;
    return !more && first >= 120 && first <= 128 && table[0] == from && table[1] == from + 0x04040404u &&
           table[2] == from + 0x08080808u && table[3] == from + 0x0c0c0c0cu;
  }
  // Whether it holds whole numbers from -64 to 63: the upper two bits of all bytes differ.
  INGOT_DEVICE bool is_small() const {
    uint32_t all = kSigns;
#pragma unroll
    for (int i = 0; i < 4; ++i) all &= table[i] ^ table[i] << 1;
    return !more && (all & kSigns) == kSigns;
  }
  // For TableWay, if it does: 64 + the numbers.
  INGOT_DEVICE void less_sixty_four(uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = table[i] - 0x40404040u;
  }
  INGOT_DEVICE bool has_table_of(const TableCodes& other) const {
    return table[0] == other.table[0] && table[1] == other.table[1] && table[2] == other.table[2] &&
           table[3] == other.table[3];
  }
  INGOT_DEVICE float first() const { return static_cast<float>(static_cast<int>(table[0] & 0xff) - 128); }
  INGOT_DEVICE static TableCodes of(const unsigned char* panel) {
    TableCodes found;
    found.more = panel[81] != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found.table[i] = reinterpret_cast<const uint32_t*>(panel + 64)[i] ^ kSigns;
    return found;
  }
  // A line holds eight k of the panel's 16 rows.
  INGOT_DEVICE static void load(uint32_t (&words)[1], const unsigned char* lines, int eight, int column) {
    words[0] = reinterpret_cast<const uint32_t*>(lines)[eight * 16 + column];
  }
  INGOT_DEVICE static int place(int, int quarter) { return quarter * 64; }
  INGOT_DEVICE static void unpack(uint32_t (&words)[1], const uint32_t (&stored)[1], int) { words[0] = stored[0]; }
  // The bytes of k 0 4 1 5, and of k 2 6 3 7. A code's upper bit chooses the half of the table.
  INGOT_DEVICE static void look_up(uint32_t (&bytes)[2], const uint32_t (&from)[4], uint32_t codes) {
    const uint32_t places = codes & 0x77777777u, halves = masked_or(codes >> 1, 0x44444444u, 0x32103210u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t which = places >> 16 * i;
      const uint32_t lower = bytes_at(from[0], from[1], which), upper = bytes_at(from[2], from[3], which);
      bytes[i] = bytes_at(lower, upper, halves >> 16 * i);
    }
  }
  INGOT_DEVICE static int byte_of(int k) { return k % 2 * 2 + k / 4; }
  INGOT_DEVICE void numbers(float (&to)[8], const uint32_t (&words)[1], const unsigned char* panel) const {
    uint32_t bytes[2];
    look_up(bytes, table, words[0]);
#pragma unroll
    for (int k = 0; k < 8; ++k) to[k] = beside_byte(bytes[k % 4 / 2], byte_of(k));
    if (!more) return;
    uint32_t rest[4];  // 256ths beside the table's numbers
#pragma unroll
    for (int i = 0; i < 4; ++i) rest[i] = reinterpret_cast<const uint32_t*>(panel + 96)[i] ^ kSigns;
    look_up(bytes, rest, words[0]);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      to[k] = fmaf(__fsub_rn(beside_byte(bytes[k % 4 / 2], byte_of(k)), kBeside), 1.f / 256, to[k]);  // exact
    }
  }
};

INGOT_DEVICE Eight TableWay::numbers(uint32_t codes, const uint32_t (&table)[4]) const {
  uint32_t bytes[2];
  TableCodes::look_up(bytes, table, codes);
  Eight found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    found.words[i] = fused_bf16(__byte_perm(bytes[i % 2], 0x43434343u, i / 2 ? 0x4341 : 0x4240), factor, less);
  }
  return found;
}

// Codes of two to six bits. Lines of low bits hold 16 k of the panel's 16 rows, two bits of each, or 8 k, four bits.
// Behind as many of them as fill a line with upper bits comes this line: of 32 k, or of 16 k where codes have six bits.
template <int kCodeBits>
struct PackedLines {
  static constexpr int kBits = kCodeBits, kStored = kBits % 2 || kBits == 6 ? 2 : 1;
  static constexpr int kLowEights = kBits < 4 ? 2 : 1, kUpperEights = kBits == 6 ? 2 : 4;  // of a line

  INGOT_DEVICE static int place(int i, int quarter) {
    if (kBits == 6) return quarter / 2 * 192 + (i == 0 ? quarter % 2 * 64 : 128);
    return i == 0 ? quarter / kLowEights * 64 : kBits < 4 ? 128 : 256;
  }
  INGOT_DEVICE static uint32_t word(const unsigned char* lines, int i, int eight, int column) {
    return reinterpret_cast<const uint32_t*>(lines)[(eight / 4 * 64 * kBits + place(i, eight % 4)) / 4 + column];
  }
  INGOT_DEVICE static void load(uint32_t (&stored)[kStored], const unsigned char* lines, int eight, int column) {
#pragma unroll
    for (int i = 0; i < kStored; ++i) stored[i] = word(lines, i, eight, column);
  }
  // What eight k do not have in a word with those before.
  INGOT_DEVICE static void load_next(uint32_t (&stored)[kStored], const unsigned char* lines, int eight, int column) {
    if (eight % kLowEights == 0) stored[0] = word(lines, 0, eight, column);
    if (kStored > 1 && eight % kUpperEights == 0) stored[kStored - 1] = word(lines, 1, eight, column);
  }
};

// Codes of two and of three bits, which are places of a table of as many bytes as there are codes.
template <int kCodeBits>
struct FewCodes : PackedLines<kCodeBits> {
  using PackedLines<kCodeBits>::kBits, PackedLines<kCodeBits>::kStored;
  static constexpr int kWords = 1, kBlock = 128;
  static constexpr int kTable = kBits - 1;  // words

  uint32_t table[kTable];

  INGOT_DEVICE static FewCodes of(const unsigned char* panel) {
    FewCodes found;
#pragma unroll
    for (int i = 0; i < kTable; ++i) found.table[i] = reinterpret_cast<const uint32_t*>(panel + 64)[i] ^ kSigns;
    return found;
  }
  // In the order of TableCodes.
  INGOT_DEVICE static void unpack(uint32_t (&words)[1], const uint32_t (&stored)[kStored], int eight) {
    const uint32_t low = stored[0] >> eight % 2 * 4;
    words[0] = masked_or(low << 2, 0x30303030u, low & 0x03030303u);
    if constexpr (kBits == 3) {
      const uint32_t upper = stored[1] >> eight % 4 * 2;
      words[0] = masked_or(upper << 5, 0x40404040u, masked_or(upper << 2, 0x04040404u, words[0]));
    }
  }
  // Those of the table.
  INGOT_DEVICE void numbers(float (&to)[4 * kTable]) const {
#pragma unroll
    for (int i = 0; i < 4 * kTable; ++i) to[i] = __fsub_rn(beside_byte(table[i / 4], i % 4), kBeside);
  }
};

// So few numbers are multiplied by the scale of a group once. Codes are places of the products.
template <int kBits>
struct FewWay {
  static constexpr int kTable = FewCodes<kBits>::kTable;

  uint32_t low[kTable], high[kTable];  // bytes of the products in bf16

  // number: those of a code each, before they are rounded.
  INGOT_DEVICE static FewWay of(const float (&number)[4 * kTable]) {
    FewWay found;
#pragma unroll
    for (int i = 0; i < kTable; ++i) {
      const uint32_t first = pack_two<BF16>(number[4 * i], number[4 * i + 1]);
      const uint32_t second = pack_two<BF16>(number[4 * i + 2], number[4 * i + 3]);
      found.low[i] = __byte_perm(first, second, 0x6420), found.high[i] = __byte_perm(first, second, 0x7531);
    }
    return found;
  }
  INGOT_DEVICE static FewWay of(const float (&number)[4 * kTable], float scale) {
    float scaled[4 * kTable];
#pragma unroll
    for (int i = 0; i < 4 * kTable; ++i) scaled[i] = __fmul_rn(number[i], scale);
    return of(scaled);
  }
  // codes: in the order of TableCodes.
  INGOT_DEVICE Eight numbers(uint32_t codes) const {
    Eight found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t which = codes >> 16 * i;
      const uint32_t lower = bytes_at(low[0], low[kTable - 1], which),
                     upper = bytes_at(high[0], high[kTable - 1], which);
      found.words[i] = __byte_perm(lower, upper, 0x6240), found.words[i + 2] = __byte_perm(lower, upper, 0x7351);
    }
    return found;
  }
};

// Signed bytes.
struct ByteCodes {
  static constexpr int kBits = 8, kStored = 2, kWords = 2, kBlock = 128;
  static constexpr bool more = false;

  INGOT_DEVICE ByteCodes of_eight_bits() const { return {}; }
  INGOT_DEVICE static ByteCodes of(const unsigned char*) { return {}; }
  // A line holds four k of the panel's 16 rows.
  INGOT_DEVICE static void load(uint32_t (&words)[2], const unsigned char* lines, int eight, int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = reinterpret_cast<const uint32_t*>(lines)[(2 * eight + i) * 16 + column];
  }
  INGOT_DEVICE static int place(int i, int quarter) { return (2 * quarter + i) * 64; }
  INGOT_DEVICE static void unpack(uint32_t (&words)[2], const uint32_t (&stored)[2], int) {
    words[0] = stored[0], words[1] = stored[1];
  }
  INGOT_DEVICE void numbers(float (&to)[8], const uint32_t (&words)[2], const unsigned char*) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) to[k] = beside_byte(words[k / 4] ^ kSigns, k % 4);
  }
};

// Groups of 16 to 128 columns have a float16 scale, and where kShifts a shift behind the scales of a panel's rows: a
// zero point, or an offset. A number is (code - zero point) * scale, or code * scale + offset.
template <bool kWideRows, class Codes, bool kShifts>
struct GroupRow {
  static constexpr bool kWide = kWideRows, kScaled = true;
  static constexpr int kNumbers = kShifts ? 2 : 1;
  template <int kHalves>
  using Strip = GroupStrip<Codes, kShifts, kHalves>;
  static constexpr int kBits = Codes::kBits;
  static constexpr int kGroupLine = 32 * kNumbers;    // bytes of what a panel's rows have of a group
  static constexpr int kStepGroups = 4 * kGroupLine;  // of those of 64 k, at most
  struct Raw {
    uint32_t words[Codes::kWords];
    uint32_t scale;  // the shift in its upper half
  };

  const unsigned char* panel;
  Codes codes;
  int lines;  // where they begin in the panel
  int column;
  int eights;  // a group has two to the power of so many times eight columns
  bool valid, offsets;
  uint32_t groups;  // what the header says of all of them

  INGOT_DEVICE static GroupRow at(const void* weight, const Sizes& of, int pair, int i) {
    const int number = 2 * pair + i / 16;
    const bool valid = number < panels_of(of);
    const unsigned char* panel = static_cast<const unsigned char*>(weight) + (valid ? number : 0) * panel_bytes(of);
    return {panel,
            Codes::of(panel),
            kPanelHeader + group_bytes(of),
            i % 16,
            eights_of(of),
            valid,
            kShifts && panel[80] != 0,
            panel[82]};
  }
  // What `value` needs.
  INGOT_DEVICE static GroupRow of_panel(const unsigned char* panel) {
    return {panel, Codes::of(panel), 0, 0, 0, true, kShifts && panel[80] != 0, panel[82]};
  }
  // The shortest way to the numbers of its panel.
  INGOT_DEVICE PanelWay way() const {
    if constexpr (Codes::kBits == 4) {
      if (codes.in_order()) {
        if (offsets) return PanelWay::kOffset;
        return !kShifts || groups & kWholeShifts ? PanelWay::kShort : PanelWay::kAny;
      }
      if (!kShifts && groups & kScalesOfFewBits && codes.is_small()) return PanelWay::kTable;
    }
    return PanelWay::kAny;
  }
  INGOT_DEVICE static int eights_of(const Sizes& of) { return 1 + (of.group > 16) + (of.group > 32) + (of.group > 64); }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return ((slabs(of.k) * kSlab + of.group - 1) / of.group * 32 * kNumbers + 63) / 64 * 64;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 2 * Codes::kBits;
  }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * panel_bytes(of); }
  INGOT_DEVICE static int slabs(int k) { return (k + Codes::kBlock - 1) / Codes::kBlock * (Codes::kBlock / kSlab); }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    Raw raw{};
    if (!valid) return raw;
    const int eight = 4 * slab + quarter;
    uint32_t stored[Codes::kStored];
    Codes::load(stored, panel + lines, eight, column);
    Codes::unpack(raw.words, stored, eight);
    const uint16_t* group =
        reinterpret_cast<const uint16_t*>(panel + kPanelHeader) + (eight >> eights) * 16 * kNumbers + column;
    raw.scale = group[0];
    if constexpr (kShifts) raw.scale |= static_cast<uint32_t>(group[16]) << 16;
    return raw;
  }
  INGOT_DEVICE Eight value(const Raw& raw) const {
    const float scale = f16_to_float(static_cast<uint16_t>(raw.scale));
    if constexpr (kBits < 4) {
      float products[4 * Codes::kTable];
      codes.numbers(products);
      return FewWay<kBits>::of(products, scale).numbers(raw.words[0]);
    } else {
      return any_value(raw, scale);
    }
  }
  INGOT_DEVICE Eight any_value(const Raw& raw, float scale) const {
    float number[8];
    codes.numbers(number, raw.words, panel);
    const float shift = kShifts ? f16_to_float(static_cast<uint16_t>(raw.scale >> 16)) : 0.f;
    if (kShifts && !offsets) {
#pragma unroll
      for (int k = 0; k < 8; ++k) number[k] = __fmul_rn(__fsub_rn(__fsub_rn(number[k], kBeside), shift), scale);
      return rounded(number);
    }
    const float less = __fmul_rn(-kBeside, scale);  // exact, so that only the product with the number is rounded
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      number[k] = fmaf(number[k], scale, less);
      if constexpr (kShifts) number[k] = __fadd_rn(number[k], shift);
    }
    return rounded(number);
  }
  INGOT_DEVICE float scale() const { return valid ? reinterpret_cast<const float*>(panel)[column] : 0.f; }
};

template <bool kWide>
using RowW2t = GroupRow<kWide, FewCodes<2>, false>;
template <bool kWide>
using RowW3t = GroupRow<kWide, FewCodes<3>, false>;
template <bool kWide>
using RowW4t = GroupRow<kWide, TableCodes, false>;
template <bool kWide>
using RowW4ts = GroupRow<kWide, TableCodes, true>;
template <bool kWide>
using RowW8t = GroupRow<kWide, ByteCodes, false>;
template <bool kWide>
using RowW8ts = GroupRow<kWide, ByteCodes, true>;

// Columns of a square of four words of four bytes become words.
INGOT_DEVICE void turn_bytes(uint32_t (&words)[4]) {
  const uint32_t low = __byte_perm(words[0], words[1], 0x5140), high = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low2 = __byte_perm(words[2], words[3], 0x5140), high2 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low, low2, 0x5410), words[1] = __byte_perm(low, low2, 0x7632);
  words[2] = __byte_perm(high, high2, 0x5410), words[3] = __byte_perm(high, high2, 0x7632);
}

// Numbers of FP8 (E4M3), of which none is NaN. With groups, of 16 to 128 columns, these have float32 scales.
template <bool kWideRows>
struct RowF8 {
  static constexpr bool kWide = kWideRows, kScaled = true;
  static constexpr int kBits = 8, kGroupLine = 64, kStepGroups = 4 * kGroupLine;
  template <int kHalves>
  using Strip = StripF8<kHalves>;
  struct Raw {
    uint32_t words[2];
    float scale;
  };

  const unsigned char* panel;
  const unsigned char* lines;
  int column;
  int eights;  // as above; 0 without groups
  bool valid;

  INGOT_DEVICE static RowF8 at(const void* weight, const Sizes& of, int pair, int i) {
    const int number = 2 * pair + i / 16;
    const bool valid = number < panels_of(of);
    const unsigned char* panel = static_cast<const unsigned char*>(weight) + (valid ? number : 0) * panel_bytes(of);
    return {panel, panel + kPanelHeader + group_bytes(of), i % 16, eights_of(of), valid};
  }
  INGOT_DEVICE static int eights_of(const Sizes& of) {
    return (of.group > 0) + (of.group > 16) + (of.group > 32) + (of.group > 64);
  }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return of.group ? (slabs(of.k) * kSlab + of.group - 1) / of.group * 64 : 0;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 16;
  }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * panel_bytes(of); }
  INGOT_DEVICE static int slabs(int k) { return (k + 63) / 64 * 2; }
  // The panel's 16 rows of one k lie side by side.
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    Raw raw{{0, 0}, 1.f};
    if (!valid) return raw;
    const int eight = 4 * slab + quarter;
    const unsigned char* from = lines + eight * 128 + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t two[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* at = from + (4 * i + 2 * half) * 16;
        two[half] = __byte_perm(at[0], at[16], 0x5540);
      }
      raw.words[i] = __byte_perm(two[0], two[1], 0x5410);
    }
    if (eights) raw.scale = reinterpret_cast<const float*>(panel + kPanelHeader)[(eight >> eights) * 16 + column];
    return raw;
  }
  // Two numbers in the upper bytes of two halves become bf16.
  INGOT_DEVICE static uint32_t widened(uint32_t bytes) {
    const uint32_t small = masked_or(bytes, 0x80008000u, bytes >> 4 & 0x07f007f0u);  // times 2^-120
    return fused_bf16(small, 0x7b807b80u, 0x80008000u);                              // exact, zeros keep signs
  }
  // Row `row` of the four whose bytes of eight k the words have.
  INGOT_DEVICE static Eight widened_row(const uint32_t (&words)[2][4], int row) {
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t (&from)[4] = words[i / 2];
      found.words[i] = widened(__byte_perm(from[i % 2 * 2], from[i % 2 * 2 + 1], 0x4400 + 0x1111 * row));
    }
    return found;
  }
  INGOT_DEVICE static Eight scaled(const Eight& numbers, float scale) {
    float number[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t two = numbers.words[k / 2];
      number[k] = __fmul_rn(__uint_as_float(k % 2 ? two & 0xffff0000u : two << 16), scale);
    }
    return rounded(number);
  }
  INGOT_DEVICE Eight value(const Raw& raw) const {
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) found.words[i] = widened(__byte_perm(raw.words[i / 2], 0, i % 2 ? 0x3424 : 0x1404));
    return eights == 0 ? found : scaled(found, raw.scale);
  }
  INGOT_DEVICE float scale() const { return valid ? reinterpret_cast<const float*>(panel)[column] : 0.f; }
};

#endif
