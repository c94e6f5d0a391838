// Products of inputs and weights of FP8 (E4M3) by the matrix instructions of warps, for GPUs of sm_89 and newer that
// have no wgmma. Sums are those of wide_fp8.cuh: the matrix units add up a step of 128 k from zero, and the total of
// all steps is added up in float32, in the order of the steps.
//
//   global memory ─ cp.async ▶ codes, x, scales ─ mma ▶ sums of a step ─ scales ▶ total
//
// A block computes 128 rows of the weight and kTokens rows of x, by eight warps: of 32 rows and half of the tokens
// each. A panel has one k of 16 rows side by side. So a lane loads words of four rows and turns them into words of four
// k:
//
//   lane group g = lane / 4    rows 4 * g ... + 3 of the warp's 32: rows g and g + 8 of two mma tiles of 16
//   quad q = lane % 4          k = 4 * q ... + 3 of 16
//
// A thread then holds the sums of four neighbouring rows.
#pragma once

#if defined(INGOT_FP8) && !defined(INGOT_WIDE) && !defined(INGOT_WEIGHT_IS_F32)

#include "fp8_inputs.cuh"
#include "tile_sums.cuh"

constexpr int kFp8RowThreads = kWidePairs * kWarp;  // whose warps compute 32 rows of the weight each
constexpr int kFp8Slices = kFp8Step / 32;           // of a step, which an instruction multiplies

// How many eights of tokens a warp multiplies at once, and whether it keeps its part of the weight for all of them. On
// sm_100, ptxas makes two float16 products of one of FP8, whose factors would take twice as many registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kMostAtOnce = 2;
constexpr bool kKeepsWeight = false;
#else
constexpr int kMostAtOnce = 4;
constexpr bool kKeepsWeight = true;
#endif

// Shared memory: x and codes of kStages steps, then their scales.
template <int kTokens, int kStages>
struct WarpFp8Tile {
  static constexpr int kPanel = kFp8Rows * kFp8Step;  // bytes of a panel's codes
  static constexpr int kInputs = kTokens * kWideLine, kStage = kInputs + kWidePanels * kPanel;
  static constexpr int kScales = 4 * (kTokens + kWideRows);  // of the rows of x, then of the weight's

  INGOT_DEVICE static unsigned char* inputs(unsigned char* tiles, int stage) { return tiles + stage * kStage; }
  INGOT_DEVICE static unsigned char* codes(unsigned char* tiles, int stage) { return inputs(tiles, stage) + kInputs; }
  INGOT_DEVICE static unsigned char* scales(unsigned char* tiles, int stage) {
    return tiles + kStages * kStage + stage * kScales;
  }
};

// Where one k of a panel lies among its codes: in its line of eight k, at another place in odd lines and in odd panels.
// So the lanes of a warp, which read k 4 * q + i of two panels, meet each bank once.
INGOT_DEVICE int fp8_word_place(int panel, int k) { return (k ^ (k / 8 % 2 + panel % 2 * 2)) * kFp8Rows; }

// Copies steps to stages: a thread the same places of each.
template <int kTokens, int kStages, int kThreads>
struct WarpFp8Copies {
  using Tile = WarpFp8Tile<kTokens, kStages>;
  static constexpr int kAtOnce = kThreads / kFp8Step, kPanels = kWidePanels / kAtOnce;  // a thread copies one k of each
  static constexpr int kLines = kThreads / 8, kPieces = kTokens / kLines;               // of x
  static constexpr int kScaleThreads = 4 * kWidePanels;  // the last ones copy four scales of a panel each

  unsigned char* tiles;
  int filled;                     // k of a panel
  const unsigned char* weight;    // this thread's k of the first step of K, in the block's first panel
  int panels[kPanels];            // where those of the thread's panels lie behind it
  const unsigned char* x;         // this thread's piece of the first row of all
  int rows[kPieces];              // where those of the thread's rows lie behind it, in pieces of 16 bytes
  const float* of_row;            // the scale of a row of x in the first step; null: this thread copies none
  int next_scale;                 // how far behind it that of the next step lies
  bool there;                     // whether there is this row
  const unsigned char* of_panel;  // four scales of a panel, likewise

  // Behind the last panel and the last row, the last ones stand in the place: nobody reads these sums.
  INGOT_DEVICE static WarpFp8Copies of(const Product& p, const Fp8Inputs& inputs, unsigned char* tiles) {
    using Row = RowF8<true>;
    const int thread = threadIdx.x, first = blockIdx.y * kWidePanels, top = p.first(kTokens);
    const int last_panel = panels_of(p.of) - 1 - first;
    const int bytes = static_cast<int>(Row::panel_bytes(p.of)), steps = (p.of.k + kFp8Step - 1) / kFp8Step;
    const unsigned char* panel =
        static_cast<const unsigned char*>(p.weight) + static_cast<int64_t>(first) * bytes + kPanelHeader;
    WarpFp8Copies found{tiles, Row::slabs(p.of.k) * kSlab};
    found.weight = panel + Row::group_bytes(p.of) + thread % kFp8Step * kFp8Rows;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) found.panels[i] = min(thread / kFp8Step + kAtOnce * i, last_panel) * bytes;
    found.x = inputs.codes + thread % 8 * 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      found.rows[i] = p.source(min(top + thread / 8 + kLines * i, p.rows - 1)) * (kFp8Step / 16) * steps;
    }
    found.of_row = nullptr, found.of_panel = nullptr, found.there = true;
    // Without groups, the rows of an expert have one scale each, which every step brings: they lie apart, and to look
    // them up behind the last step would take long.
    const bool one = p.pairs && !p.of.group;
    found.next_scale = one ? 0 : 1;
    if ((p.of.group || one) && thread < kTokens) {
      found.there = top + thread < p.rows;
      const int64_t row = found.there ? p.source(top + thread) : 0;
      found.of_row = inputs.scales + row * (one ? 1 : steps);
    }
    const int piece = thread - (kThreads - kScaleThreads);
    if (p.of.group && piece >= 0) {
      found.of_panel = panel + static_cast<int64_t>(min(piece / 4, last_panel)) * bytes + piece % 4 * 16;
    }
    return found;
  }
  INGOT_DEVICE void copy_weight(int step, int stage) const {
    const int k = threadIdx.x % kFp8Step, first = threadIdx.x / kFp8Step;
    const bool valid = step * kFp8Step + k < filled;
    const unsigned char* from = weight + (valid ? step * Tile::kPanel : 0);
    unsigned char* to = Tile::codes(tiles, stage);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const int panel = first + kAtOnce * i;
      copy_async(to + panel * Tile::kPanel + fp8_word_place(panel, k), from + panels[i], valid);
    }
    if (of_panel) {
      unsigned char* scales = Tile::scales(tiles, stage) + 4 * kTokens;
      copy_async(scales + 16 * (threadIdx.x - (kThreads - kScaleThreads)), of_panel + step * 4 * kFp8Rows, true);
    }
  }
  INGOT_DEVICE void copy_inputs(int step, int stage) const {
    unsigned char* to = Tile::inputs(tiles, stage) + wide_place(threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const unsigned char* from = x + static_cast<int64_t>(rows[i]) * 16 + step * kFp8Step;
      copy_async(to + i * kLines * kWideLine, from, true);
    }
    unsigned char* scales = Tile::scales(tiles, stage);
    if (of_row) copy_word_async(scales + 4 * threadIdx.x, of_row + step * next_scale, there);
  }
};

// The sums of a warp: rows 4 * g ... of its 32 and, of every eight tokens, 2 * q and 2 * q + 1.
template <int kTokens, int kStages, int kThreads>
struct WarpFp8Sums {
  using Tile = WarpFp8Tile<kTokens, kStages>;
  static constexpr int kOwn = kTokens * kFp8RowThreads / kThreads, kEights = kOwn / 8;  // of the warp's tokens
  static constexpr int kAtOnce = kEights < kMostAtOnce ? kEights : kMostAtOnce;

  float total[kEights][2][4];  // of all steps that are over
  int row;                     // of the block's 128, the first of the lane's four
  int token;                   // of the block, the warp's first
  int codes_at[4];             // where the lane's words of 16 k lie in a stage
  int inputs_at[kFp8Slices];   // where the lane's row of a matrix lies, for each slice

  INGOT_DEVICE static WarpFp8Sums of() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, matrix = lane / 8;
    WarpFp8Sums found{};
    found.row = warp % kWidePairs * kPairRows + lane / 4 * 4, found.token = warp / kWidePairs * kOwn;
    const int panel = found.row / kFp8Rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      found.codes_at[i] = panel * Tile::kPanel + fp8_word_place(panel, lane % 4 * 4 + i) + found.row % kFp8Rows;
      hold(found.codes_at[i]);
    }
#pragma unroll
    for (int slice = 0; slice < kFp8Slices; ++slice) {
      found.inputs_at[slice] = wide_place(found.token + matrix / 2 * 8 + lane % 8, 2 * slice + matrix % 2);
      hold(found.inputs_at[slice]);
    }
    return found;
  }
  // The lane's part of a slice of the weight.
  INGOT_DEVICE void load_weight(uint32_t (&a)[2][4], const unsigned char* codes, int slice) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned char* from = codes + codes_at[i] + (2 * slice + half) * 16 * kFp8Rows;
        words[i] = *reinterpret_cast<const uint32_t*>(from);
      }
      turn_bytes(words);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i / 2][2 * half + i % 2] = words[i];
    }
  }
  INGOT_DEVICE void add(const Product& p, const float* scales, int eight, const float (&sum)[2][4]) {
    if (!p.of.group) {
#pragma unroll
      for (int at = 0; at < 8; ++at) {
        float& to = total[eight][at / 4][at % 4];
        to = __fadd_rn(to, sum[at / 4][at % 4]);
      }
      return;
    }
    const TwoFloats x = *reinterpret_cast<const TwoFloats*>(scales + token + 8 * eight + threadIdx.x % 4 * 2);
    const Four<float> weight = load_four(scales + kTokens + row);
#pragma unroll
    for (int at = 0; at < 8; ++at) {
      float& to = total[eight][at / 4][at % 4];
      to = fmaf(sum[at / 4][at % 4], __fmul_rn(at % 2 ? x.second : x.first, weight.at[at / 2]), to);
    }
  }
  INGOT_DEVICE void multiply(const Product& p, unsigned char* tiles, int stage) {
    const unsigned char *inputs = Tile::inputs(tiles, stage), *codes = Tile::codes(tiles, stage);
    const float* scales = reinterpret_cast<const float*>(Tile::scales(tiles, stage));
    uint32_t a[kFp8Slices][2][4];
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
      if (first > 0 && !kKeepsWeight) __syncwarp();  // or what was loaded would be kept after all
      float sum[kAtOnce][2][4];
#pragma unroll
      for (int slice = 0; slice < kFp8Slices; ++slice) {
        if (first == 0 || !kKeepsWeight) load_weight(a[slice], codes, slice);
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
          uint32_t b[4];  // of two eights
          load_matrices(b, inputs + inputs_at[slice] + (first + i) * 8 * kWideLine);
#pragma unroll
          for (int half = 0; half < 4; ++half) {
            float (&to)[4] = sum[i + half / 2][half % 2];
            const uint32_t low = b[half / 2 * 2], high = b[half / 2 * 2 + 1];
            if (slice == 0) {
              multiply_fp8(to, a[slice][half % 2], low, high);
            } else {
              multiply_add_fp8(to, a[slice][half % 2], low, high);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(p, scales, first + i, sum[i]);
    }
  }
  // → shared memory, four rows of the weight at once. Behind the last row and panel nobody reads them. of_list: of an
  // expert without groups, the scales of its rows of x.
  INGOT_DEVICE void gather(const Product& p, const Fp8Inputs& x, const float* of_list, float* sums) const {
    const int i = row % kPairRows, pair = row / kPairRows;
    const bool gated = p.of.half != 0;
    const int column = !gated ? row : i / 16 * (kWideRows / 2) + pair * 16 + i % 16;
    const int panel = min(static_cast<int>(blockIdx.y) * kWidePanels + row / kFp8Rows, panels_of(p.of) - 1);
    const unsigned char* header = static_cast<const unsigned char*>(p.weight) + panel * RowF8<true>::panel_bytes(p.of);
    const Four<float> weight = load_four(reinterpret_cast<const float*>(header) + row % kFp8Rows);
#pragma unroll
    for (int at = 0; at < 2 * kEights; ++at) {
      const int own = token + at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
      const int of_x = min(p.first(kTokens) + own, p.rows - 1);
      Four<float> values;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = total[at / 2][j / 2][j % 2 * 2 + at % 2];
        values.at[j] =
            __fmul_rn(p.of.group ? value : __fmul_rn(value, p.pairs ? of_list[own] : x.scales[of_x]), weight.at[j]);
      }
      *reinterpret_cast<Four<float>*>(sums + own * kWideSums + column) = values;
    }
  }
};

// parts: null, or where sums of part blockIdx.z of K go, [parts][rows][n].
template <int kTokens, int kStages, int kThreads>
INGOT_DEVICE void warp_fp8_product(const Product& p, const Fp8Inputs& x, unsigned char* tiles, float* parts) {
  using Tile = WarpFp8Tile<kTokens, kStages>;
  constexpr int kAhead = kStages - 1;  // steps under way
  static_assert(4 * kTokens * kWideSums <= kStages * Tile::kStage, "sums end before the scales");
  const int all = (p.of.k + kFp8Step - 1) / kFp8Step;
  const int begin = static_cast<int>(static_cast<int64_t>(blockIdx.z) * all / gridDim.z);
  const int end = static_cast<int>((static_cast<int64_t>(blockIdx.z) + 1) * all / gridDim.z);
  const auto copies = WarpFp8Copies<kTokens, kStages, kThreads>::of(p, x, tiles);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) copies.copy_weight(begin + i, i);
  }
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) copies.copy_inputs(begin + i, i);
    copy_commit();  // the first one has the weights too
  }
  auto of = WarpFp8Sums<kTokens, kStages, kThreads>::of();
  for (int step = begin, stage = 0, before = kStages - 1; step < end; ++step) {
    copy_wait<kAhead - 1>();
    __syncthreads();  // this step is there for all, and nobody reads the one before it any more
    if (step + kAhead < end) {
      copies.copy_weight(step + kAhead, before);
      copies.copy_inputs(step + kAhead, before);
    }
    copy_commit();
    of.multiply(p, tiles, stage);
    before = stage, stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();  // nobody needs the tiles any more
  float* sums = reinterpret_cast<float*>(tiles);
  of.gather(p, x, reinterpret_cast<const float*>(Tile::scales(tiles, 0)), sums);
  __syncthreads();
  finish_tile<kTokens, kThreads>(p, sums, parts);
}

// Grids: (tiles of rows of x, tiles of 128 rows of the weight, parts of K)
#define INGOT_WARP_FP8_PRODUCT(kTokens, kStages, kThreads, kBlocks)                     \
  INGOT_KERNEL_TO_SHARE(kThreads, kBlocks)                                              \
  product_f8f8_##kTokens(INGOT_PRODUCT_PARAMETERS, const float* scales, float* parts) { \
    INGOT_SHARED(tiles);                                                                \
    if (kTokens <= 64) let_next_begin();                                                \
    const Fp8Inputs inputs{reinterpret_cast<const unsigned char*>(x), scales};          \
    warp_fp8_product<kTokens, kStages, kThreads>(INGOT_PRODUCT, inputs, tiles, parts);  \
  }

#define INGOT_WARP_FP8_PRODUCTS(kTokens, kStages, kThreads, kBlocks)         \
  INGOT_WARP_FP8_PRODUCT(kTokens, kStages, kThreads, kBlocks)                \
  INGOT_FP8_EXPERTS(experts_f8f8_##kTokens, kThreads, kBlocks, INGOT_SHARED, \
                    warp_fp8_product<kTokens, kStages, kThreads>)
INGOT_WARP_FP8_PRODUCTS(16, 5, 128, 2)
INGOT_WARP_FP8_PRODUCTS(64, 4, 256, 1)
INGOT_WARP_FP8_PRODUCTS(128, 3, 256, 1)

#endif
