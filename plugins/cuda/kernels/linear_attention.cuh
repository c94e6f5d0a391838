// What the two kernels of linear attention share: the gated delta rule, Kimi Delta Attention, Mamba 2.
//
// Both carry a state on token by token, with the same operations in the same order. So a token has the same bits in a
// prompt and in decode, and a sequence in chunks of any length.
//
//   part: of the dims of a key, of which there are 16. A sum over the dims is one of each part, in ascending order, and
//   then sums of two: of part p and p + 8, of those with p + 4, with p + 2, with p + 1.
#pragma once

#include "states.cuh"

constexpr int kLinearThreads = 128, kKeyParts = 16, kWarpColumns = 8;
constexpr int kStripColumns = kLinearThreads / kWarp * kWarpColumns;  // of a value, in a block

struct LinearShape {
  int heads;
  int key_heads;
  int key_dim;
  int value_dim;
  int values_first;  // a row of x is v | k | q of all heads, else q | k | v
  int by_dim;        // dt has a number for each dim of a key
  float scale;
  float l2_eps;  // 0: queries and keys are not normed
  float dt_min;
  float dt_max;

  // Rows of a state that belong to a part: so many, in fours, of which the last may not be there.
  INGOT_DEVICE int part_rows() const { return (key_dim + 4 * kKeyParts - 1) / (4 * kKeyParts) * 4; }
  // Numbers of a token in x.
  INGOT_DEVICE int row() const { return 2 * key_heads * key_dim + heads * value_dim; }
  // Whether each four of a query or a key lies on 16 bytes; likewise a value.
  INGOT_DEVICE bool whole_keys() const { return key_dim % 4 == 0 && heads * value_dim % 4 == 0; }
  INGOT_DEVICE bool whole_values() const { return value_dim % 4 == 0; }
  // Of a row and a column in a slot.
  INGOT_DEVICE int64_t place(int head, int row, int column) const {
    return (static_cast<int64_t>(head) * key_dim + row) * value_dim + column;
  }
  INGOT_DEVICE float step_of(float dt) const {
    const float softplus = fmaxf(dt, 0.f) + log1pf(expf(-fabsf(dt)));
    return fminf(fmaxf(softplus, dt_min), dt_max);
  }
  // The factor of a query or a key, from its sum of squares.
  INGOT_DEVICE float norm_factor(float squares) const { return 1.f / sqrtf(squares + l2_eps); }
};

// The query, key and value of a token and head.
struct LinearRow {
  const float* q;
  const float* k;
  const float* v;

  INGOT_DEVICE LinearRow(const LinearShape& shape, const float* x, int64_t token, int head) {
    const int keys = shape.key_heads * shape.key_dim, values = shape.heads * shape.value_dim;
    const int key_head = head / (shape.heads / shape.key_heads);
    const float* row = x + token * shape.row();
    k = row + (shape.values_first ? values : keys) + key_head * shape.key_dim;
    q = shape.values_first ? k + keys : row + key_head * shape.key_dim;
    v = (shape.values_first ? row : row + 2 * keys) + head * shape.value_dim;
  }
};

INGOT_DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// The sum over the parts of a warp, of which lanes 2 * p and 2 * p + 1 have part p.
INGOT_DEVICE float sum_parts(float value) {
#pragma unroll
  for (int step = kWarp / 2; step >= kWarp / kKeyParts; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

#define INGOT_LINEAR_PARAMETERS                                                                                    \
  float *y, const float *x, const float *dt, const float *beta, const float *a_log, const float *skip,             \
      INGOT_STATES_PARAMETERS, int heads, int key_heads, int key_dim, int value_dim, int values_first, int by_dim, \
      float scale, float l2_eps, float dt_min, float dt_max
#define INGOT_LINEAR_SHAPE \
  LinearShape { heads, key_heads, key_dim, value_dim, values_first, by_dim, scale, l2_eps, dt_min, dt_max }
