// What products of inputs and weights of FP8 (E4M3) take, by warpgroups (wide_fp8.cuh) or by warps (warp_fp8.cuh).
#pragma once

constexpr int kFp8Step = 128;  // k whose products the matrix units add up from zero
constexpr int kFp8Rows = 16;   // of a panel

// What is multiplied, as the op `round_to_fp8` makes it. Codes of x: [rows][filled], zeros behind k. Scales of x: of a
// weight with groups [rows][groups], else [rows]. Of an expert, rows are those of its list; without groups, their
// scales come with every step.
struct Fp8Inputs {
  const unsigned char* codes;
  const float* scales;
};

// A kernel of experts, with the list of their tiles. Grids: (tiles of experts, tiles of 128 rows of the weight). What
// multiplies a tile comes last.
#ifdef INGOT_EXPERTS
#define INGOT_FP8_EXPERTS(name, kThreads, kBlocks, share, ...)                  \
  INGOT_KERNEL_TO_SHARE(kThreads, kBlocks)                                      \
  name(INGOT_EXPERT_PARAMETERS, const float* scales) {                          \
    share(shared);                                                              \
    wait_for_previous();                                                        \
    const ExpertTile tile = tiles[blockIdx.x];                                  \
    if (tile.count == 0) return;                                                \
    const int64_t bytes = RowF8<true>::bytes({n, k, gated ? n / 2 : 0, group}); \
    const Product p = of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS);           \
    const Fp8Inputs inputs{reinterpret_cast<const unsigned char*>(x), scales};  \
    __VA_ARGS__(p, inputs, shared, nullptr);                                    \
  }
#else
#define INGOT_FP8_EXPERTS(...)
#endif
