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
