// Products of more than a few rows on sm_90a, by the matrix instructions of warpgroups (wgmma.cuh).
//
// A block computes 128 rows of the weight, which are factor a, and kTokens rows of x, which are factor b. Steps of 64 k
// of both are copied to shared memory as they lie in memory, kStages of them. One warpgroup copies: warps that multiply
// wait in each instruction until the matrix units take it. Two warpgroups multiply 64 rows of the weight each. Floats
// come straight from shared memory; of w8 and w4 a lane makes its part of a in registers: whole numbers, which bf16
// holds exactly. Kept codes become numbers in shared memory (wide_kept.cuh). FP8 is multiplied by FP8
// (wide_fp8.cuh). Behind the last step the sums go through
// shared memory, so that a thread finishes four neighbouring columns.
//
// Rows of the weight lie in a tile so that lines j and j + 8 of 16 are rows i and i + 16 of a pair: then one thread
// holds the sums of gate and up.
//
// Where a weight has too few rows for all multiprocessors, K is cut into parts (blockIdx.z). Their sums go to memory,
// and product_sum adds them up in order.
//
// Of a mixture of experts, a block computes a tile of an expert's rows: they are looked up in a list (experts.cuh), and
// the weight is the expert's.
#pragma once

#include "tile_sums.cuh"
#include "wgmma.cuh"

#if defined(INGOT_WIDE) && !defined(INGOT_WEIGHT_IS_F32)

constexpr int kWideThreads = 3 * kGroup, kMultiplying = 2 * kGroup;  // of a block, of these the first
constexpr int kStep = 64;                                            // k

// Floats: a line of the tile for each row.
struct WideFloats {
  static constexpr bool kCodes = false;
  static constexpr int kBytes = kWideRows * kWideLine, kGroups = 0;  // in a stage: of the weight, of its groups

  const unsigned char* from[8];  // pieces of 16 bytes that a thread copies
  bool valid[8];

  INGOT_DEVICE static int steps(int k) { return (k + kStep - 1) / kStep; }
  INGOT_DEVICE static WideFloats of(const Product& p) {
    WideFloats found;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int line = threadIdx.x % kGroup / 8 + 16 * i;
      const int row = line % 16 / 8 * 16 + line % 32 / 16 * 8 + line % 8, pair = blockIdx.y * kWidePairs + line / 32;
      const int col = p.of.half ? pair * 16 + row % 16 : pair * kPairRows + row;
      found.valid[i] = col < (p.of.half ? p.of.half : p.of.n);
      const int64_t at = !found.valid[i] ? 0 : p.of.half && row >= 16 ? p.of.half + col : col;
      found.from[i] = reinterpret_cast<const unsigned char*>(static_cast<const Weight*>(p.weight) + at * p.of.k);
    }
    return found;
  }
  INGOT_DEVICE void copy(unsigned char* to, const Product& p, int step) const {
    const int piece = threadIdx.x % 8, column = step * kStep + piece * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool here = valid[i] && column < p.of.k;
      copy_async(to + wide_place(threadIdx.x % kGroup / 8 + 16 * i, piece), here ? from[i] + 2 * column : from[i],
                 here);
    }
  }
  INGOT_DEVICE static float scale(const Product&, int, int) { return 1.f; }
};

#ifdef INGOT_CODES

// What formats of codes share: panels of 16 rows, which have the rows' scales, what groups have, and codes. Format says
// how they lie there.
template <class Format>
struct WideCodes {
  static constexpr bool kCodes = true, kGrouped = Format::kGroupLine > 0;
  static constexpr int kPanelGroups = 4 * Format::kGroupLine;  // bytes of a panel's groups in a step, at most
  static constexpr int kBytes = kWidePanels * Format::kPanel, kGroups = kWidePanels * kPanelGroups;
  static constexpr int kPieces = kBytes / 16 / kGroup;

  const unsigned char* weight;
  int64_t bytes;  // from a panel to the next
  int groups;     // bytes of what the groups of a panel have
  int panels;

  INGOT_DEVICE static int steps(int k) { return Format::steps(k); }
  INGOT_DEVICE static WideCodes of(const Product& p) {
    const int k = steps(p.of.k) * kStep;
    const int groups = kGrouped ? ((k + p.of.group - 1) / p.of.group * Format::kGroupLine + 63) / 64 * 64 : 0;
    const int64_t bytes = kPanelHeader + groups + Format::codes_at(steps(p.of.k));
    return {static_cast<const unsigned char*>(p.weight), bytes, groups, panels_of(p.of)};
  }
  INGOT_DEVICE const unsigned char* panel(int number) const {
    return weight + (number < panels ? number : 0) * bytes + kPanelHeader;
  }
  INGOT_DEVICE void copy(unsigned char* to, const Product& p, int step) const {
    constexpr int kEach = Format::kPanel / 16;  // pieces of a panel
    const int thread = threadIdx.x % kGroup;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = thread + i * kGroup, number = blockIdx.y * kWidePanels + at / kEach;
      copy_async(to + at * 16, panel(number) + groups + Format::codes_at(step) + at % kEach * 16, number < panels);
    }
    if constexpr (kGrouped) {
      const int lines = p.of.group >= kStep ? 1 : kStep / p.of.group;
      const int piece = thread % 16, number = blockIdx.y * kWidePanels + thread / 16;
      if (piece < lines * Format::kGroupLine / 16) {
        const int line = p.of.group >= kStep ? step * kStep / p.of.group : step * lines;
        copy_async(to + kBytes + thread / 16 * kPanelGroups + piece * 16,
                   panel(number) + line * Format::kGroupLine + piece * 16, number < panels);
      }
    }
  }
  // Of row `column` of a panel.
  INGOT_DEVICE static float scale(const Product& p, int number, int column) {
    return reinterpret_cast<const float*>(of(p).panel(number) - kPanelHeader)[column];
  }

  // a of 16 k, of the lane's rows: the same of two neighbouring panels. shift: groups of 16 << shift columns.
  INGOT_DEVICE static void fragment(uint32_t (&a)[4], const unsigned char* tile, int sixteen, int step, int shift) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, column = warp % 2 * 8 + lane / 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int number = warp / 2 * 2 + row;
      const unsigned char* codes = tile + number * Format::kPanel;
      const unsigned char* group = tile + kBytes + number * kPanelGroups + (sixteen >> shift) * Format::kGroupLine;
      const Format format = Format::of(group, column);
#pragma unroll
      for (int i = 0; i < 2; ++i) a[2 * i + row] = format.two(codes, 2 * sixteen + i, column, lane % 4, step);
    }
  }
};

// Whole numbers from -127 to 127: a line has four k of a panel's 16 rows, a byte each.
struct WideW8 {
  static constexpr int kPanel = 1024, kGroupLine = 0;  // bytes of a panel: codes of a step, what a group has

  INGOT_DEVICE static int steps(int k) { return (k + 63) / 64; }
  INGOT_DEVICE static int codes_at(int step) { return step * kPanel; }
  INGOT_DEVICE static WideW8 of(const unsigned char*, int) { return {}; }
  // The lane's two k of eight.
  INGOT_DEVICE static uint32_t two(const unsigned char* codes, int eight, int column, int quarter, int) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[eight * 32 + quarter / 2 * 16 + column];
    return bytes_to_bf16(__byte_perm(word, 0, quarter % 2 ? 0x4342 : 0x4140));
  }
};

// Codes from -8 to 7 times a multiplier from -15 to 15 that a group shares: bf16 holds the product. Bytes have two
// codes: the second 64 k of 128 lie in the high bits.
struct WideW4 {
  static constexpr int kPanel = 1024, kGroupLine = 16;

  uint32_t factor, less;  // twice the multiplier, and -136 times it

  INGOT_DEVICE static int steps(int k) { return (k + 127) / 128 * 2; }
  INGOT_DEVICE static int codes_at(int step) { return step / 2 * kPanel; }
  INGOT_DEVICE static WideW4 of(const unsigned char* group, int column) {
    const uint32_t factor = bytes_to_bf16(__byte_perm(group[column], 0, 0x4040));
    return {factor, fused_bf16(factor, 0xc308c308u, 0)};
  }
  INGOT_DEVICE uint32_t two(const unsigned char* codes, int eight, int column, int quarter, int step) const {
    const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[eight * 32 + quarter / 2 * 16 + column];
    const uint32_t bytes = __byte_perm(word >> step % 2 * 4, 0, quarter % 2 ? 0x4342 : 0x4140);
    return fused_bf16((bytes & 0x000f000fu) | kBias, factor, less);  // 136 + the code
  }
};

#endif

template <class Rows, int kTokens, int kStages>
struct ProductTile {
  static constexpr int kAhead = kStages - 2;  // steps under way; the matrix units may still read the one before
  static constexpr int kWeight = kTokens * kWideLine;  // where that lies in a stage
  static constexpr int kStage = (kWeight + Rows::kBytes + Rows::kGroups + kWideAlign - 1) / kWideAlign * kWideAlign;
};

// Sums of a thread that multiplies → shared memory.
template <class Rows, int kTokens>
INGOT_DEVICE void gather_sums(const Product& p, const float (&sum)[kTokens / 2], float* sums) {
  const bool gated = p.of.half != 0;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int pair = warp / 2, i = warp % 2 * 8 + lane / 4, panel = blockIdx.y * kWidePanels + 2 * pair;
  const int first = gated ? pair * 16 + i : pair * kPairRows + i;
  const int second = gated ? kWideRows / 2 + first : first + 16;
  const float scale = Rows::scale(p, panel, i), scale16 = Rows::scale(p, panel + 1, i);
#pragma unroll
  for (int at = 0; at < kTokens / 2; ++at) {
    const int token = at / 4 * 8 + lane % 4 * 2 + at % 2;
    const bool upper = at % 4 >= 2;
    const float value = Rows::kCodes ? __fmul_rn(sum[at], upper ? scale16 : scale) : sum[at];
    sums[token * kWideSums + (upper ? second : first)] = value;
  }
}

// A step of x: a row is a line of 128 bytes, of whose pieces of 16 bytes a thread copies one, and that of every
// sixteenth row behind it.
template <int kTokens>
struct RowsInOrder {
  INGOT_DEVICE static RowsInOrder of(const Product&) { return {}; }
  INGOT_DEVICE void copy(unsigned char* tile, const Product& p, int step) const {
    const int k = p.of.k, column = step * kStep + threadIdx.x % 8 * 8, first = threadIdx.x % kGroup / 8;
    const int top = blockIdx.x * kTokens + first;
    const Weight* from = p.x + static_cast<int64_t>(top) * k + column;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      const bool valid = top + 16 * i < p.rows && column < k;
      copy_async(tile + wide_place(first + 16 * i, threadIdx.x % 8),
                 valid ? from + static_cast<int64_t>(16 * i) * k : p.x, valid);
    }
  }
};

// The same of rows that row(i) names for the lines i * 16 behind the thread's first one.
template <int kTokens, class Row>
INGOT_DEVICE void copy_rows(unsigned char* tile, const Product& p, int step, const Row& row) {
  const int column = step * kStep + threadIdx.x % 8 * 8;
  const bool valid = column < p.of.k;
  const unsigned char* from = reinterpret_cast<const unsigned char*>(p.x + (valid ? column : 0));
  const int line = p.of.k * static_cast<int>(sizeof(Weight));
  unsigned char* to = tile + wide_place(threadIdx.x % kGroup / 8, threadIdx.x % 8);
#pragma unroll
  for (int i = 0; i < kTokens / 16; ++i) {
    copy_async(to + 16 * i * kWideLine, from + static_cast<int64_t>(row(i)) * line, valid);
  }
}

// Rows in a list are looked up once. Behind the last row, the last one stands in the place: nobody reads these sums.
template <int kTokens>
struct RowsOfList {
  int source[kTokens / 16];

  INGOT_DEVICE static RowsOfList of(const Product& p) {
    RowsOfList found;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      found.source[i] = p.source(min(static_cast<int>(threadIdx.x) % kGroup / 8 + 16 * i, p.rows - 1));
    }
    return found;
  }
  INGOT_DEVICE void copy(unsigned char* tile, const Product& p, int step) const {
    copy_rows<kTokens>(tile, p, step, [&](int i) { return source[i]; });
  }
};

// Copies steps to shared memory, by one warpgroup.
template <class Rows, class Inputs, int kTokens, int kStages>
struct WideCopies {
  using Shape = ProductTile<Rows, kTokens, kStages>;

  const Product& p;
  Rows rows;
  Inputs inputs;
  unsigned char* tiles;
  int begin;  // the first step

  INGOT_DEVICE unsigned char* stage(int step) const { return tiles + (step - begin) % kStages * Shape::kStage; }
  INGOT_DEVICE void copy_weight(int step) const { rows.copy(stage(step) + Shape::kWeight, p, step); }
  INGOT_DEVICE void copy_inputs(int step) const { inputs.copy(stage(step), p, step); }
  // All of them; a barrier for each, behind which it is there.
  INGOT_DEVICE void run(int end) const {
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) {
      if (begin + i < end) copy_weight(begin + i);
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) {
      if (begin + i < end) copy_inputs(begin + i);
      copy_commit();  // the first one has the weights too
    }
    for (int step = begin; step < end; ++step) {
      copy_wait<Shape::kAhead - 1>();
      let_units_see();
      meet_groups<kWideThreads>();
      if (step + Shape::kAhead < end) {
        copy_weight(step + Shape::kAhead);
        copy_inputs(step + Shape::kAhead);
      }
      copy_commit();
    }
  }
};

// sum += a step's product, of tiles of the weight and of x. The last products may still be under way, those of earlier
// steps are not.
template <int kTokens>
INGOT_DEVICE void multiply_tiles(float (&sum)[kTokens / 2], const unsigned char* weight, const unsigned char* inputs) {
  const unsigned char* own = weight + threadIdx.x / kGroup * 64 * kWideLine;
  group_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i) group_multiply<Weight, kTokens>(sum, describe_rows(own, i), describe_rows(inputs, i));
  group_commit();
  group_wait<1>();
}

// The same, of a stage.
template <class Rows, int kTokens, int kStages>
INGOT_DEVICE void multiply_step(float (&sum)[kTokens / 2], uint32_t (&a)[2][4], const unsigned char* stage, int step,
                                int group) {
  const unsigned char* tile = stage + ProductTile<Rows, kTokens, kStages>::kWeight;
  if constexpr (Rows::kCodes) {
    const int shift = group == 32 ? 1 : 2;  // of groups of 64 and 128 columns a step has one
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      group_wait<1>();  // the product before the last has read these registers
      Rows::fragment(a[i % 2], tile, i, step, shift);
      group_begin();
      group_multiply<Weight, kTokens>(sum, a[i % 2], describe_rows(stage, i));
      group_commit();
    }
  } else {
    multiply_tiles<kTokens>(sum, tile, stage);
  }
}

// parts: null, or where sums of part blockIdx.z of K go, [parts][rows][n].
template <class Rows, int kTokens, int kStages, template <int> class Inputs = RowsInOrder>
INGOT_DEVICE void wide_product(const Product& p, unsigned char* tiles, float* parts) {
  const int steps = Rows::steps(p.of.k);
  const int begin = static_cast<int>(static_cast<int64_t>(blockIdx.z) * steps / gridDim.z);
  const int end = static_cast<int>((static_cast<int64_t>(blockIdx.z) + 1) * steps / gridDim.z);
  float sum[kTokens / 2] = {};
  if (threadIdx.x >= kMultiplying) {
    using Copies = WideCopies<Rows, Inputs<kTokens>, kTokens, kStages>;
    Copies{p, Rows::of(p), Inputs<kTokens>::of(p), tiles, begin}.run(end);
  } else {
    uint32_t a[2][4];
    for (int step = begin; step < end; ++step) {
      meet_groups<kWideThreads>();  // this step is there, and all are done with the one before the last
      const unsigned char* stage = tiles + (step - begin) % kStages * ProductTile<Rows, kTokens, kStages>::kStage;
      multiply_step<Rows, kTokens, kStages>(sum, a, stage, step, p.of.group);
    }
    group_wait<0>(sum);
    wait_for_previous();  // of whose results the epilogue reads some
  }
  __syncthreads();  // nobody needs the stages any more
  float* sums = reinterpret_cast<float*>(tiles);
  if (threadIdx.x < kMultiplying) gather_sums<Rows, kTokens>(p, sum, sums);
  __syncthreads();
  finish_tile<kTokens, kWideThreads>(p, sums, parts);
}

// Of experts. Row: of whose weights an expert has so many bytes; then the product that computes a tile. Grid: (tiles of
// experts, tiles of 128 rows of the weight)
#ifdef INGOT_EXPERTS
#define INGOT_WIDE_OF_EXPERT(name, kBlocks, Row, ...)                             \
  INGOT_KERNEL_TO_SHARE(kWideThreads, kBlocks)                                    \
  name(INGOT_EXPERT_PARAMETERS) {                                                 \
    INGOT_SHARED_WIDE(shared);                                                    \
    wait_for_previous();                                                          \
    const ExpertTile tile = tiles[blockIdx.x];                                    \
    if (tile.count == 0) return;                                                  \
    const int64_t bytes = Row<true>::bytes({n, k, gated ? n / 2 : 0, group});     \
    __VA_ARGS__(of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS), shared, nullptr); \
  }
#else
#define INGOT_WIDE_OF_EXPERT(...)
#endif

#ifdef INGOT_CODES
#include "wide_kept.cuh"
#ifdef INGOT_FP8
#include "wide_fp8.cuh"
#endif
#endif

// Grids: (tiles of rows of x, tiles of 128 rows of the weight, parts of K)
#define INGOT_WIDE_PRODUCT(name, kTokens, kStages, kBlocks, Rows)      \
  INGOT_KERNEL_TO_SHARE(kWideThreads, kBlocks)                         \
  name(INGOT_PRODUCT_PARAMETERS, float* parts) {                       \
    INGOT_SHARED_WIDE(tiles);                                          \
    if (kTokens <= 64) let_next_begin();                               \
    wide_product<Rows, kTokens, kStages>(INGOT_PRODUCT, tiles, parts); \
  }

#define INGOT_WIDE_PRODUCTS(format, kTokens, kStages, kBlocks, Rows, Row)               \
  INGOT_WIDE_PRODUCT(product_##format##wide_##kTokens, kTokens, kStages, kBlocks, Rows) \
  INGOT_WIDE_OF_EXPERT(experts_##format##wide_##kTokens, kBlocks, Row, wide_product<Rows, kTokens, kStages, RowsOfList>)

INGOT_WIDE_PRODUCTS(, 64, 8, 1, WideFloats, FloatRow)
INGOT_WIDE_PRODUCTS(, 128, 6, 1, WideFloats, FloatRow)
#ifdef INGOT_CODES_W8
INGOT_WIDE_PRODUCTS(w8_, 64, 6, 2, WideCodes<WideW8>, RowW8)
INGOT_WIDE_PRODUCTS(w8_, 128, 8, 1, WideCodes<WideW8>, RowW8)
INGOT_WIDE_PRODUCT(product_w8_wide_256, 256, 5, 1, WideCodes<WideW8>)
#endif
#ifdef INGOT_CODES_W4
INGOT_WIDE_PRODUCTS(w4_, 64, 6, 2, WideCodes<WideW4>, RowW4)
INGOT_WIDE_PRODUCTS(w4_, 128, 8, 1, WideCodes<WideW4>, RowW4)
INGOT_WIDE_PRODUCT(product_w4_wide_256, 256, 5, 1, WideCodes<WideW4>)
#endif
INGOT_FOR_KEPT_CODES(INGOT_KEPT_PRODUCTS)

#endif
