// How a thread gets eight neighbouring k of a row of a weight as the matrix units take them, from each format. Codes
// become whole numbers, which bf16 holds exactly; the row's scale multiplies the sum.
//
// A row of a weight is one of the 32 of a pair: neighbours, or 16 of gate and 16 of up. `plugins/layouts.py` defines
// the panels of codes, where pairs of panels are these.
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

// 16 bytes of a weight, whose neighbours in a row come next: the L2 cache gets 128 bytes of it at once. Weights are
// read once, so they take no place in the L1 cache.
#ifdef __CUDACC__
INGOT_DEVICE Eight stream_eight(const void* from) {
  Eight found;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3])
               : "l"(__cvta_generic_to_global(from)));
  return found;
}
#else
inline Eight stream_eight(const void* from) { return *static_cast<const Eight*>(from); }
#endif

// As they lie in the checkpoint, in the type of the matrix units.
template <bool kWideRows>
struct FloatRow {
  static constexpr bool kWide = kWideRows, kScaled = false;
  static constexpr int kAhead = kWide ? 4 : 1;
  using Raw = Eight;

  const Weight* row;
  int end;
  bool valid;

  // Row `i` of the 32 of a pair.
  INGOT_DEVICE static FloatRow at(const void* weight, const Sizes& of, int pair, int i) {
    const int col = of.half ? pair * 16 + i % 16 : pair * kPairRows + i;
    const bool valid = col < (of.half ? of.half : of.n);
    const int row = !valid ? 0 : of.half && i >= 16 ? of.half + col : col;
    return {static_cast<const Weight*>(weight) + static_cast<int64_t>(row) * of.k, of.k, valid};
  }
  // Of a whole weight.
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return static_cast<int64_t>(of.n) * of.k * sizeof(Weight); }
  INGOT_DEVICE static int slabs(int k) { return (k + kSlab - 1) / kSlab; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    const int k = slab * kSlab + 8 * quarter;
    if constexpr (kWide) {
      if (valid && k < end) return stream_eight(row + k);
      return Eight{{0, 0, 0, 0}};
    }
    return load_eight<kWide>(row, k, end, valid);
  }
  INGOT_DEVICE static Eight value(const Raw& raw) { return raw; }
  INGOT_DEVICE float scale() const { return 1.f; }
};

#ifdef INGOT_CODES

// strips.cuh
template <int kHalves>
struct StripW8;
template <int kHalves>
struct StripW4;

constexpr int kPanelHeader = 128;
constexpr uint32_t kBias = 0x43004300;  // twice 128 in bf16: its lowest seven bits are whole numbers

// Bytes 0 and 1, or 2 and 3, in a half each.
INGOT_DEVICE uint32_t two_bytes(uint32_t word, int second) { return __byte_perm(word, 0, second ? 0x4342 : 0x4140); }

INGOT_DEVICE int panels_of(const Sizes& of) { return of.half ? 2 * ((of.half + 15) / 16) : (of.n + 15) / 16; }

// Bytes 0 and 2 of a word, from -127 to 127: 128 + the lowest seven bits, less 128 or 256 as the sign says.
INGOT_DEVICE uint32_t bytes_to_bf16(uint32_t two) {
  return fused_bf16(masked_or(two, 0x00800080u, kBias), 0xbf80bf80u, masked_or(two, 0x007f007fu, kBias));
}

// Whole numbers from -127 to 127, a byte each.
template <bool kWideRows>
struct RowW8 {
  static constexpr bool kWide = kWideRows, kScaled = true;
  template <int kHalves>
  using Strip = StripW8<kHalves>;
  struct Raw {
    uint32_t words[2];
  };

  const unsigned char* panel;
  int column;
  bool valid;

  INGOT_DEVICE static RowW8 at(const void* weight, const Sizes& of, int pair, int i) {
    const int number = 2 * pair + i / 16;
    const bool valid = number < panels_of(of);
    return {static_cast<const unsigned char*>(weight) + (valid ? number : 0) * panel_bytes(of), i % 16, valid};
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + static_cast<int64_t>(slabs(of.k)) * kSlab * 16;
  }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * panel_bytes(of); }
  INGOT_DEVICE static int slabs(int k) { return (k + 63) / 64 * 2; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    if (!valid) return {{0, 0}};
    const uint32_t* codes =
        reinterpret_cast<const uint32_t*>(panel + kPanelHeader) + slab * 128 + quarter * 32 + column;
    return {{codes[0], codes[16]}};
  }
  INGOT_DEVICE static Eight value(const Raw& raw) {
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      found.words[i] = bytes_to_bf16(two_bytes(raw.words[i / 2], i % 2));
    }
    return found;
  }
  INGOT_DEVICE float scale() const { return valid ? reinterpret_cast<const float*>(panel)[column] : 0.f; }
};

// Codes from -8 to 7 times a multiplier from -15 to 15, which `group` columns share.
template <bool kWideRows>
struct RowW4 {
  static constexpr bool kWide = kWideRows, kScaled = true;
  template <int kHalves>
  using Strip = StripW4<kHalves>;
  struct Raw {
    uint32_t words[2];
    uint32_t multiplier;  // a signed byte
  };

  const unsigned char* panel;
  const unsigned char* codes;
  int column;
  int group_shift;  // of a slab's number
  bool valid;

  INGOT_DEVICE static RowW4 at(const void* weight, const Sizes& of, int pair, int i) {
    const int number = 2 * pair + i / 16;
    const bool valid = number < panels_of(of);
    const unsigned char* panel = static_cast<const unsigned char*>(weight) + (valid ? number : 0) * panel_bytes(of);
    return {panel, panel + kPanelHeader + group_bytes(of), i % 16, shift_of_group(of), valid};
  }
  INGOT_DEVICE static int shift_of_group(const Sizes& of) { return of.group == 128 ? 2 : of.group / 64; }
  INGOT_DEVICE static int group_bytes(const Sizes& of) {
    return ((slabs(of.k) * kSlab + of.group - 1) / of.group * 16 + 63) / 64 * 64;
  }
  INGOT_DEVICE static int64_t panel_bytes(const Sizes& of) {
    return kPanelHeader + group_bytes(of) + static_cast<int64_t>(slabs(of.k)) * kSlab * 8;
  }
  INGOT_DEVICE static int64_t bytes(const Sizes& of) { return panels_of(of) * panel_bytes(of); }
  INGOT_DEVICE static int slabs(int k) { return (k + 127) / 128 * 4; }
  INGOT_DEVICE Raw load(int slab, int quarter) const {
    if (!valid) return {{0x88888888u, 0x88888888u}, 1};
    const uint32_t multiplier = panel[kPanelHeader + (slab >> group_shift) * 16 + column];
    const uint32_t* at =
        reinterpret_cast<const uint32_t*>(codes) + slab / 4 * 256 + slab % 2 * 128 + quarter * 32 + column;
    const int high = slab % 4 / 2 * 4;  // the second 64 of a block lie in the high nibbles
    return {{at[0] >> high, at[16] >> high}, multiplier};
  }
  // Of a multiplier: it twice, and it times -136, which has eight bits and three zeros.
  INGOT_DEVICE static void factors(uint32_t& factor, uint32_t& less, uint32_t multiplier) {
    factor = bytes_to_bf16(__byte_perm(multiplier, 0, 0x4040));
    less = fused_bf16(factor, 0xc308c308u, 0);
  }
  INGOT_DEVICE static Eight numbers(const uint32_t (&words)[2], uint32_t factor, uint32_t less) {
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = two_bytes(words[i / 2], i % 2);
      found.words[i] = fused_bf16(masked_or(two, 0x000f000fu, kBias), factor, less);  // of 136 + the code
    }
    return found;
  }
  INGOT_DEVICE static Eight value(const Raw& raw) {
    uint32_t factor, less;
    factors(factor, less, raw.multiplier);
    return numbers(raw.words, factor, less);
  }
  INGOT_DEVICE float scale() const { return valid ? reinterpret_cast<const float*>(panel)[column] : 0.f; }
};

#endif
#endif
