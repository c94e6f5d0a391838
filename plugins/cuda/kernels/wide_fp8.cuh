// Products of inputs and weights of FP8 (E4M3) on sm_90a: the matrix units multiply the codes as they are.
//
// A block works as in wide_kept.cuh. A step has 128 k, which is a line of a tile. The warpgroup that copies also turns
// the weight's codes, of which a panel has one k of 16 rows side by side, into lines of neighbouring k:
//
//   global memory ─ cp.async ▶ codes ─ turn ▶ lines ─ wgmma ▶ sums of a step ─ scales ▶ total
//                   cp.async ▶ x ───────────────┘
//
// The matrix units keep about 14 bits of a sum of FP8 numbers. So they add up one step from zero, and the total of all
// steps is added up in float32, in the order of the steps. Where the weight has groups of columns, the sum of a step is
// multiplied by their scale and by that of the row of x.
//
// The two warpgroups that multiply take turns: while one waits for its sums, the other adds its own to its total. The
// second one is half a step behind: it adds up a step behind the barrier of the next one.
#pragma once

#include "fp8_inputs.cuh"

// Shared memory: kStages steps of x, tiles of the weight, scales of kStages steps, codes of kCodeStages steps.
template <int kTokens, int kStages, int kCodeStages>
struct Fp8Tile {
  static constexpr int kAhead = kStages - 2;  // steps of x under way
  static constexpr int kInputs = kTokens * kWideLine, kLines = kWideRows * kWideLine;
  static constexpr int kLineStages = 3;  // being made, multiplied, and perhaps still multiplied by the second warpgroup
  static constexpr int kScales = 4 * (kTokens + kWideRows);  // of the rows of x, then of the weight's
  static constexpr int kPanel = kFp8Rows * kFp8Step;         // bytes of a panel's codes
  static_assert(kAhead > 0 && kCodeStages > kAhead, "the codes of the next step are there when x of this one is");

  INGOT_DEVICE static unsigned char* inputs(unsigned char* tiles, int step) { return tiles + step % kStages * kInputs; }
  INGOT_DEVICE static unsigned char* lines(unsigned char* tiles, int step) {
    return tiles + kStages * kInputs + step % kLineStages * kLines;
  }
  INGOT_DEVICE static unsigned char* scales(unsigned char* tiles, int step) {
    return tiles + kStages * kInputs + kLineStages * kLines + step % kStages * kScales;
  }
  INGOT_DEVICE static unsigned char* codes(unsigned char* tiles, int step) {
    constexpr int kFirst = kStages * (kInputs + kScales) + kLineStages * kLines;
    return tiles + kFirst + step % kCodeStages * kWidePanels * kPanel;
  }
};

// Where one k of a panel lies among its codes: threads that read the same k of several sixteens meet other banks.
INGOT_DEVICE int fp8_place(int k) { return (k / 16 * 16 + (k % 16 ^ k / 16)) * 16; }

// A thread makes 16 bytes of four rows, twice: a word of the codes has one k of all four.
template <class Tile>
INGOT_DEVICE void turn_step(unsigned char* lines, const unsigned char* codes) {
  const int lane = threadIdx.x % kWarp, sixteen = lane % 8, first = lane / 8 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int panel = threadIdx.x % kGroup / kWarp + 4 * half;
    const unsigned char* from = codes + panel * Tile::kPanel + first;
    uint32_t words[4][4];
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const int place = (sixteen * 16 + (k ^ sixteen)) * 16;
      words[k / 4][k % 4] = *reinterpret_cast<const uint32_t*>(from + place);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) turn_bytes(words[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = kept_line(panel, first + i);
      store_numbers(lines + wide_place(line, sixteen), {{words[0][i], words[1][i], words[2][i], words[3][i]}});
    }
  }
}

// Copies codes and x, and turns codes, by one warpgroup.
template <int kTokens, int kStages, int kCodeStages>
struct Fp8Copies {
  using Tile = Fp8Tile<kTokens, kStages, kCodeStages>;

  const Product& p;
  unsigned char* tiles;
  int begin;                                // the first step
  int filled;                               // k of a panel
  const unsigned char* codes[kWidePanels];  // of this thread in the first step of K
  const unsigned char* rows[kTokens / 16];
  const float* of_row;            // the scale of a row, likewise; null: this thread copies none
  const unsigned char* of_panel;  // four scales of a panel, likewise
  bool there;                     // whether there is this row

  // Which four of the panels' scales a thread copies: of the smaller tiles, threads that copy none of the rows'.
  INGOT_DEVICE static int scale_piece(int thread) { return thread - kTokens % kGroup; }
  // Behind the last panel and the last row, the last ones stand in the place: nobody reads these sums.
  INGOT_DEVICE static Fp8Copies of(const Product& p, const Fp8Inputs& x, unsigned char* tiles, int begin) {
    using Row = RowF8<true>;
    const int thread = threadIdx.x % kGroup, first = blockIdx.y * kWidePanels, top = p.first(kTokens);
    const auto panel = [&](int number) {
      const int64_t at = min(first + number, panels_of(p.of) - 1) * Row::panel_bytes(p.of) + kPanelHeader;
      return static_cast<const unsigned char*>(p.weight) + at;
    };
    Fp8Copies found{p, tiles, begin, Row::slabs(p.of.k) * kSlab, {}, {}, nullptr, nullptr, true};
#pragma unroll
    for (int i = 0; i < kWidePanels; ++i) found.codes[i] = panel(i) + Row::group_bytes(p.of) + thread * kFp8Rows;
    const int steps = (p.of.k + kFp8Step - 1) / kFp8Step;
    const int64_t line = static_cast<int64_t>(steps) * kFp8Step;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      found.rows[i] = x.codes + p.source(min(top + thread / 8 + 16 * i, p.rows - 1)) * line + thread % 8 * 16;
    }
    const int row = top + thread, piece = scale_piece(thread);
    if ((p.of.group || p.pairs) && thread < kTokens) {
      found.there = row < p.rows;
      const int each = p.pairs && !p.of.group ? 1 : steps;  // of a row
      found.of_row = x.scales + (found.there ? static_cast<int64_t>(p.source(row)) * each : 0);
    }
    if (p.of.group && piece >= 0 && piece < 4 * kWidePanels) found.of_panel = panel(piece / 4) + piece % 4 * 16;
    return found;
  }
  INGOT_DEVICE void copy_codes(int step) const {
    const int thread = threadIdx.x % kGroup;
    const bool valid = step * kFp8Step + thread < filled;
    const int from = valid ? step * Tile::kPanel : 0;
    unsigned char* to = Tile::codes(tiles, step - begin) + fp8_place(thread);
#pragma unroll
    for (int i = 0; i < kWidePanels; ++i) copy_async(to + i * Tile::kPanel, codes[i] + from, valid);
  }
  INGOT_DEVICE void copy_inputs(int step) const {
    const int thread = threadIdx.x % kGroup;
    unsigned char* to = Tile::inputs(tiles, step - begin) + wide_place(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) copy_async(to + 16 * i * kWideLine, rows[i] + step * kFp8Step, true);
    unsigned char* scales = Tile::scales(tiles, step - begin);
    if (of_row) copy_word_async(scales + 4 * thread, of_row + (p.pairs && !p.of.group ? 0 : step), there);
    if (of_panel) {
      copy_async(scales + 4 * kTokens + 16 * scale_piece(thread), of_panel + step * 4 * kFp8Rows, true);
    }
  }
  // A barrier for each step, behind which its lines and x are there, and one before, for the first codes.
  INGOT_DEVICE void run(int end) const {
    for (int i = 0; i < kCodeStages - 1; ++i) {
      if (begin + i < end) copy_codes(begin + i);
    }
    copy_commit();
    wait_for_previous();
    for (int i = 0; i < Tile::kAhead - 1; ++i) {
      if (begin + i < end) copy_inputs(begin + i);
      copy_commit();
    }
    for (int step = begin - 1; step < end; ++step) {
      copy_wait<Tile::kAhead - 1>();  // x of this step and the codes of the next are there
      let_units_see();
      meet_groups<kWideThreads>();
      if (step + Tile::kAhead < end) copy_inputs(step + Tile::kAhead);
      if (step + kCodeStages < end) copy_codes(step + kCodeStages);
      copy_commit();
      if (step + 1 < end) turn_step<Tile>(Tile::lines(tiles, step + 1 - begin), Tile::codes(tiles, step + 1 - begin));
    }
  }
};

// Multiplies, by one of two warpgroups.
template <int kTokens, int kStages, int kCodeStages>
struct Fp8Sums {
  using Tile = Fp8Tile<kTokens, kStages, kCodeStages>;

  float total[kTokens / 2], sum[kTokens / 2];  // of all steps that are over, of one step

  // sum = a step's product. It is under way until group_wait.
  INGOT_DEVICE void multiply(unsigned char* tiles, int step) {
    const unsigned char* own = Tile::lines(tiles, step) + threadIdx.x / kGroup * 64 * kWideLine;
    const unsigned char* inputs = Tile::inputs(tiles, step);
    group_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      group_multiply<E4M3, kTokens>(sum, describe_rows(own, i), describe_rows(inputs, i), i > 0);
    }
    group_commit();
  }
  INGOT_DEVICE void add(const Product& p, unsigned char* tiles, int step) {
    group_wait<0>(sum);
    if (!p.of.group) {
#pragma unroll
      for (int at = 0; at < kTokens / 2; ++at) total[at] = __fadd_rn(total[at], sum[at]);
      return;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const float* of_x = reinterpret_cast<const float*>(Tile::scales(tiles, step));
    const float* of_weight = of_x + kTokens + warp / 2 * kPairRows + warp % 2 * 8 + lane / 4;
    const float lower = of_weight[0], upper = of_weight[kFp8Rows];
#pragma unroll
    for (int at = 0; at < kTokens / 2; at += 4) {
      const TwoFloats x = *reinterpret_cast<const TwoFloats*>(of_x + at * 2 + lane % 4 * 2);
      total[at] = fmaf(sum[at], __fmul_rn(x.first, lower), total[at]);
      total[at + 1] = fmaf(sum[at + 1], __fmul_rn(x.second, lower), total[at + 1]);
      total[at + 2] = fmaf(sum[at + 2], __fmul_rn(x.first, upper), total[at + 2]);
      total[at + 3] = fmaf(sum[at + 3], __fmul_rn(x.second, upper), total[at + 3]);
    }
  }
  INGOT_DEVICE void run(const Product& p, unsigned char* tiles, int steps) {
#pragma unroll
    for (int at = 0; at < kTokens / 2; ++at) total[at] = 0.f;
    meet_groups<kWideThreads>();  // the first codes are there
    if (threadIdx.x < kGroup) {
      for (int step = 0; step < steps; ++step) {
        meet_groups<kWideThreads>();  // this step is there, and the second warpgroup is done with the one before the
                                      // last
        multiply(tiles, step);
        add(p, tiles, step);
      }
      return;
    }
    meet_groups<kWideThreads>();
    multiply(tiles, 0);
    for (int step = 1; step < steps; ++step) {
      meet_groups<kWideThreads>();
      add(p, tiles, step - 1);
      multiply(tiles, step);
    }
    add(p, tiles, steps - 1);
  }
};

// parts: as in wide_product.
template <int kTokens, int kStages, int kCodeStages>
INGOT_DEVICE void fp8_product(const Product& p, const Fp8Inputs& x, unsigned char* tiles, float* parts) {
  const int steps = (p.of.k + kFp8Step - 1) / kFp8Step;
  const int begin = static_cast<int>(static_cast<int64_t>(blockIdx.z) * steps / gridDim.z);
  const int end = static_cast<int>((static_cast<int64_t>(blockIdx.z) + 1) * steps / gridDim.z);
  float* sums = reinterpret_cast<float*>(tiles);
  if (threadIdx.x >= kMultiplying) {
    Fp8Copies<kTokens, kStages, kCodeStages>::of(p, x, tiles, begin).run(end);
    meet_groups<kWideThreads>();
  } else {
    Fp8Sums<kTokens, kStages, kCodeStages> of;
    of.run(p, tiles, end - begin);
    wait_for_previous();  // of whose results the epilogue reads some
    if (!p.of.group) {
      const float* of_list = reinterpret_cast<const float*>(Fp8Tile<kTokens, kStages, kCodeStages>::scales(tiles, 0));
      const int first = p.first(kTokens) + threadIdx.x % 4 * 2;
#pragma unroll
      for (int at = 0; at < kTokens / 2; ++at) {
        const int row = first + at / 4 * 8 + at % 2;
        of.total[at] = __fmul_rn(of.total[at], p.pairs ? of_list[row] : x.scales[min(row, p.rows - 1)]);
      }
    }
    meet_groups<kWideThreads>();  // nobody needs the tiles any more
    gather_sums<KeptScale<RowF8<true>>, kTokens>(p, of.total, sums);
  }
  __syncthreads();
  finish_tile<kTokens, kWideThreads>(p, sums, parts);
}

#define INGOT_FP8_PRODUCT(kTokens, kStages, kCodeStages, kBlocks)                            \
  INGOT_KERNEL_TO_SHARE(kWideThreads, kBlocks)                                               \
  product_f8f8_wide_##kTokens(INGOT_PRODUCT_PARAMETERS, const float* scales, float* parts) { \
    INGOT_SHARED_WIDE(tiles);                                                                \
    if (kTokens <= 64) let_next_begin();                                                     \
    const Fp8Inputs inputs{reinterpret_cast<const unsigned char*>(x), scales};               \
    fp8_product<kTokens, kStages, kCodeStages>(INGOT_PRODUCT, inputs, tiles, parts);         \
  }

#define INGOT_FP8_PRODUCTS(kTokens, kStages, kCodeStages, kBlocks)                         \
  INGOT_FP8_PRODUCT(kTokens, kStages, kCodeStages, kBlocks)                                \
  INGOT_FP8_EXPERTS(experts_f8f8_wide_##kTokens, kWideThreads, kBlocks, INGOT_SHARED_WIDE, \
                    fp8_product<kTokens, kStages, kCodeStages>)
INGOT_FP8_PRODUCTS(16, 4, 3, 2)
INGOT_FP8_PRODUCTS(64, 4, 6, 1)
INGOT_FP8_PRODUCTS(128, 4, 6, 1)
