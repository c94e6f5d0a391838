// How a thread gets eight neighbouring k of some rows of a weight as the matrix units take them, from each format.
// Codes become small numbers, which bf16 holds exactly; scales multiply sums.
//
// A row of a weight is one of the 32 of a pair: neighbours, or 16 of gate and 16 of up. `plugins/layouts.py` defines
// the panels of codes, where pairs of panels are these. There, neighbouring rows lie side by side, so that one access
// of a thread brings codes of two or four of them.
#pragma once

#include "matrix_units.cuh"

struct Sizes {
  int n;  // rows of the weight, gate and up together
  int k;
  int half;   // of a gated product, else 0
  int group;  // columns that share a multiplier
};

#ifndef INGOT_WEIGHT_IS_F32

constexpr int kSlab = 32;      // k
constexpr int kPairRows = 32;  // of the weight

struct Eight {
  uint32_t words[4];  // two neighbours each, the first in the low half
};

// k, ... k + 7 of a row; zeros behind its end. kWide: rows are whole multiples of 16 bytes.
template <bool kWide>
INGOT_DEVICE Eight load_eight(const Weight* row, int k, int end, bool valid) {
  Eight found{{0, 0, 0, 0}};
  if (!valid || k >= end) return found;
  if constexpr (kWide) {
    return *reinterpret_cast<const Eight*>(__builtin_assume_aligned(row + k, 16));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (k + i < end) found.words[i / 2] |= static_cast<uint32_t>(row[k + i].bits) << (16 * (i % 2));
    }
    return found;
  }
}

// Words that lie side by side, on their own size.
template <int kWords>
struct alignas(4 * kWords) Neighbours {
  uint32_t at[kWords];
};

// Words of a weight, behind which a warp reads on: the L2 cache gets 128 bytes of it at once. Weights are read once, so
// they take no place in the L1 cache.
#ifdef __CUDACC__
template <int kWords>
INGOT_DEVICE Neighbours<kWords> stream(const void* from) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  Neighbours<kWords> found;
  const uint64_t address = __cvta_generic_to_global(from);
  if constexpr (kWords == 1) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(found.at[0]) : "l"(address));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(found.at[0]), "=r"(found.at[1])
                 : "l"(address));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.at[0]), "=r"(found.at[1]), "=r"(found.at[2]), "=r"(found.at[3])
                 : "l"(address));
  }
  return found;
}
#else
template <int kWords>
Neighbours<kWords> stream(const void* from) {
  return *static_cast<const Neighbours<kWords>*>(from);
}
#endif

// One, two or four bytes of a weight, whose neighbours the same warp reads at once: the L1 cache keeps them so long.
template <int kBytes>
INGOT_DEVICE uint32_t read_bytes(const void* from) {
#ifdef __CUDACC__
  const uint64_t address = __cvta_generic_to_global(from);
  uint32_t found;
  if constexpr (kBytes == 1) {
    asm volatile("ld.global.nc.L2::128B.u8 %0, [%1];" : "=r"(found) : "l"(address));
  } else if constexpr (kBytes == 2) {
    asm volatile("ld.global.nc.L2::128B.u16 %0, [%1];" : "=r"(found) : "l"(address));
  } else {
    asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(found) : "l"(address));
  }
  return found;
#else
  if constexpr (kBytes == 1) return *static_cast<const uint8_t*>(from);
  if constexpr (kBytes == 2) return *static_cast<const uint16_t*>(from);
  return *static_cast<const uint32_t*>(from);
#endif
}

// So many bytes, which lie on their own size, in words.
template <int kBytes>
struct Bytes {
  uint32_t words[(kBytes + 3) / 4];

  INGOT_DEVICE static Bytes load(const unsigned char* from) {
    Bytes found;
    if constexpr (kBytes == 1) {
      found.words[0] = *from;
    } else if constexpr (kBytes == 2) {
      found.words[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
      const auto words = *reinterpret_cast<const Neighbours<kBytes / 4>*>(from);
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) found.words[i] = words.at[i];
    }
    return found;
  }
};

constexpr uint32_t kOnes = 0x3f803f80;  // twice 1 in bf16

// What groups of columns have, for each of a lane's rows: a sum over a group's columns is multiplied by its scale; the
// sum of x over them, multiplied by the shift, is added.
template <int kRows>
struct OfGroup {
  float scale[kRows], shift[kRows];
};

// Formats without groups.
struct NoGroup {
  uint32_t words[1];
};

// As they lie in the checkpoint, in the type of the matrix units: each eighth row from one on.
template <int kRows, bool kWideRows>
struct FloatRows {
  static constexpr bool kWide = kWideRows, kScaled = false, kGrouped = false, kShifts = false, kTables = false;
  static constexpr int kShare = 2;  // blocks of few rows on a multiprocessor; one less for more than eight rows
  static constexpr int kAhead = (kWide ? 16 : 4) / kRows;  // pieces under way
  static constexpr int kPiece = 1;                         // slabs that a load brings
  struct Raw {
    Eight rows[kRows];
  };
  using Piece = Raw;
  using RawGroup = NoGroup;

  const Weight* from[kRows];
  int end;
  bool valid[kRows];

  // Row `i` of the 32 of a pair, and each eighth behind it.
  INGOT_DEVICE static FloatRows at(const void* weight, const Sizes& of, int pair, int i) {
    FloatRows found;
    found.end = of.k;
#pragma unroll
    for (int r = 0; r < kRows; ++r, i += 8) {
      const int col = of.half ? pair * 16 + i % 16 : pair * kPairRows + i;
      const bool valid = col < (of.half ? of.half : of.n);
      const int row = !valid ? 0 : of.half && i >= 16 ? of.half + col : col;
      found.from[r] = static_cast<const Weight*>(weight) + static_cast<int64_t>(row) * of.k;
      found.valid[r] = valid;
    }
    return found;
  }
  // The first row of lanes 4 * group ... + 3; which lanes have row i, and the number that it has there.
  INGOT_DEVICE static int first(int group) { return group; }
  INGOT_DEVICE static int group_of(int i) { return i % 8; }
  INGOT_DEVICE static int number_of(int i) { return i / 8; }
  // Of a whole weight.
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return static_cast<int64_t>(of.n) * of.k * sizeof(Weight); }
  INGOT_DEVICE static int slabs(int k) { return (k + kSlab - 1) / kSlab; }
  INGOT_DEVICE static bool halves(const Sizes&) { return false; }
  INGOT_DEVICE static OfGroup<kRows> of_group(const RawGroup&) { return {}; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    const int k = slab * kSlab + 8 * quarter;
    Raw raw;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      raw.rows[r] = Eight{{0, 0, 0, 0}};
      if constexpr (!kWide) {
        raw.rows[r] = load_eight<kWide>(from[r], k, end, valid[r]);
      } else if (valid[r] && k < end) {
        const Neighbours<4> words = stream<4>(from[r] + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.rows[r].words[i] = words.at[i];
      }
    }
    return raw;
  }
  INGOT_DEVICE Piece load_piece(int piece, int quarter) const { return load(piece, quarter); }
  INGOT_DEVICE static const Raw& slab_of(const Piece& piece, int) { return piece; }
  INGOT_DEVICE static void values(Eight (&to)[kRows], const Raw& raw) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = raw.rows[r];
  }
  INGOT_DEVICE static float scale(const void*, const Sizes&, int, int) { return 1.f; }
};

#ifdef INGOT_CODES

constexpr int kPanelHeader = 128;
constexpr uint32_t kBias = 0x43004300;   // twice 128 in bf16: its lowest seven bits are whole numbers
constexpr uint32_t kSigns = 0x80808080;  // signed bytes become those from 0 to 255, 128 larger

// Bytes 0 and 1, or 2 and 3, in a half each.
INGOT_DEVICE uint32_t two_bytes(uint32_t word, int second) { return __byte_perm(word, 0, second ? 0x4342 : 0x4140); }

INGOT_DEVICE int panels_of(const Sizes& of) { return of.half ? 2 * ((of.half + 15) / 16) : (of.n + 15) / 16; }

// Where the panel of row i of a pair begins. Rows behind the last panel read that one, and nobody reads their sums.
INGOT_DEVICE const unsigned char* panel_at(const void* weight, const Sizes& of, int64_t bytes, int pair, int i) {
  const int number = min(2 * pair + i / 16, panels_of(of) - 1);
  return static_cast<const unsigned char*>(weight) + number * bytes;
}

// Bytes 0 and 2 of a word, from -128 to 127: 128 + the lowest seven bits, less 128 or 256 as the sign says.
INGOT_DEVICE uint32_t bytes_to_bf16(uint32_t two) {
  return fused_bf16(and_or(two, 0x00800080u, kBias), 0xbf80bf80u, and_or(two, 0x007f007fu, kBias));
}
// The lowest four bits of both halves, from 0 to 15, and a number in bf16 that is added to 128 + them.
INGOT_DEVICE uint32_t nibbles_to_bf16(uint32_t two, uint32_t less) {
  return fused_bf16(and_or(two, 0x000f000fu, kBias), kOnes, less);
}

// Byte `which` of a word, from -128 to 127: placed behind the bits of 2^15, whose ulp it is counted in.
INGOT_DEVICE float signed_byte(uint32_t word, int which) {
  const uint32_t bits = __byte_perm(word ^ kSigns, 0x47000000u, 0x7404u + 16 * which);
  return __fsub_rn(__uint_as_float(bits), 32768 + 128);
}

// What all formats of codes share. A lane has kRows neighbours of a panel. Format says how many bytes a panel has.
template <class Format, int kRows>
struct PanelRows {
  INGOT_DEVICE static int first(int group) { return kRows * group; }
  INGOT_DEVICE static int group_of(int i) { return i / kRows; }
  INGOT_DEVICE static int number_of(int i) { return i % kRows; }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * Format::panel_bytes(of); }
  INGOT_DEVICE static float scale(const void* weight, const Sizes& of, int pair, int i) {
    return reinterpret_cast<const float*>(panel_at(weight, of, Format::panel_bytes(of), pair, i))[i % 16];
  }
};

// Lines of four k of a panel's 16 rows, a signed byte each.
template <int kRows>
struct ByteLines {
  struct Raw {
    uint32_t words[2][kRows];
  };

  INGOT_DEVICE static Raw load(const unsigned char* lines, int slab, int quarter) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto words = stream<kRows>(lines + slab * 512 + quarter * 128 + i * 64);
#pragma unroll
      for (int r = 0; r < kRows; ++r) raw.words[i][r] = words.at[r];
    }
    return raw;
  }
  INGOT_DEVICE static void values(Eight (&to)[kRows], const Raw& raw) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[r].words[i] = bytes_to_bf16(two_bytes(raw.words[i / 2][r], i % 2));
    }
  }
};

// Whole numbers from -127 to 127, a byte each.
template <int kRows, bool kWideRows>
struct RowsW8 : PanelRows<RowsW8<kRows, kWideRows>, kRows> {
  static constexpr bool kWide = kWideRows, kScaled = true, kGrouped = false, kShifts = false, kTables = false;
  static constexpr int kShare = 3;  // blocks of few rows on a multiprocessor; one less for more than eight rows
  static constexpr int kAhead = kWide ? 8 / kRows : 1, kPiece = 1;
  using Raw = typename ByteLines<kRows>::Raw;
  using Piece = Raw;
  using RawGroup = NoGroup;

  const unsigned char* lines;

  // Of rows i, ... of the 32 of a pair.
  INGOT_DEVICE static RowsW8 at(const void* weight, const Sizes& of, int pair, int i) {
    RowsW8 found;
    found.lines = panel_at(weight, of, panel_bytes(of), pair, i) + kPanelHeader + i % 16 * 4;
    return found;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + static_cast<int64_t>(slabs(of.k)) * kSlab * 16;
  }
  INGOT_DEVICE static int slabs(int k) { return (k + 63) / 64 * 2; }
  INGOT_DEVICE static bool halves(const Sizes&) { return false; }
  INGOT_DEVICE static OfGroup<kRows> of_group(const RawGroup&) { return {}; }
  INGOT_DEVICE Raw load(int slab, int quarter) const { return ByteLines<kRows>::load(lines, slab, quarter); }
  INGOT_DEVICE Piece load_piece(int piece, int quarter) const { return load(piece, quarter); }
  INGOT_DEVICE static const Raw& slab_of(const Piece& piece, int) { return piece; }
  INGOT_DEVICE static void values(Eight (&to)[kRows], const Raw& raw) { ByteLines<kRows>::values(to, raw); }
};

// Codes from -8 to 7 times a multiplier from -15 to 15, which `group` columns share. The second 64 columns of 128 lie
// in the high bits of the bytes of the first.
template <int kRows, bool kWideRows>
struct RowsW4 : PanelRows<RowsW4<kRows, kWideRows>, kRows> {
  static constexpr bool kWide = kWideRows, kScaled = true, kGrouped = true, kShifts = false, kTables = false;
  static constexpr int kShare = 2;  // blocks of few rows on a multiprocessor; one less for more than eight rows
  static constexpr int kAhead = kWide ? 8 / kRows : 1, kPiece = 4;
  using Raw = typename ByteLines<kRows>::Raw;  // nibbles in the low bits of bytes
  struct Piece {
    Raw halves[2];
  };
  using RawGroup = Bytes<kRows>;  // signed bytes

  const unsigned char* multipliers;
  const unsigned char* lines;
  int group_shift;  // of a slab's number

  INGOT_DEVICE static RowsW4 at(const void* weight, const Sizes& of, int pair, int i) {
    const unsigned char* panel = panel_at(weight, of, panel_bytes(of), pair, i) + kPanelHeader;
    RowsW4 found;
    found.multipliers = panel + i % 16;
    found.lines = panel + group_bytes(of) + i % 16 * 4;
    found.group_shift = of.group == 128 ? 2 : of.group / 64;
    return found;
  }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return ((slabs(of.k) * kSlab + of.group - 1) / of.group * 16 + 63) / 64 * 64;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 8;
  }
  INGOT_DEVICE static int slabs(int k) { return (k + 127) / 128 * 4; }
  INGOT_DEVICE static bool halves(const Sizes&) { return false; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    return high_or_low(ByteLines<kRows>::load(lines, slab / 4 * 2 + slab % 2, quarter), slab % 4 / 2);
  }
  INGOT_DEVICE Piece load_piece(int piece, int quarter) const {
    return {{ByteLines<kRows>::load(lines, 2 * piece, quarter), ByteLines<kRows>::load(lines, 2 * piece + 1, quarter)}};
  }
  INGOT_DEVICE static Raw slab_of(const Piece& piece, int slab) {
    return high_or_low(piece.halves[slab % 2], slab / 2);
  }
  INGOT_DEVICE static Raw high_or_low(const Raw& both, int high) {
    Raw found;
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i)
      found.words[i / kRows][i % kRows] = both.words[i / kRows][i % kRows] >> 4 * high;
    return found;
  }
  INGOT_DEVICE static void values(Eight (&to)[kRows], const Raw& raw) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[r].words[i] = nibbles_to_bf16(two_bytes(raw.words[i / 2][r], i % 2), 0xc308c308u);  // 128 + (code + 8) - 136
      }
    }
  }
  // What the groups have of the rows so many further on in the panel.
  INGOT_DEVICE RawGroup load_group(int slab, int, int further = 0) const {
    return RawGroup::load(multipliers + further + (slab >> group_shift) * 16);
  }
  INGOT_DEVICE OfGroup<kRows> of_group(const RawGroup& raw) const {
    OfGroup<kRows> found;
#pragma unroll
    for (int r = 0; r < kRows; ++r) found.scale[r] = signed_byte(raw.words[0], r);
    return found;
  }
};

#endif
#endif
