// Linear attention of steps in which each sequence has one token.
#pragma once

#include "linear_attention.cuh"

// A warp has 8 columns of a head's state [key_dim][value_dim] in its registers while it goes through
// the tokens of a sequence. Lane 2 * p + c holds columns 4 * c to 4 * c + 3 of part p of the rows.
//
//            8 columns               A token reads its key and query (each lane those of its rows) and value, sums over
//           ┌────┬────┐              rows by shuffles, and needs no barrier. A state is read and written once for all
//   part 0  │ 0  │ 1  │ lanes        tokens of a step, 16 bytes at an access, 128 bytes of each row by the four warps
//   of
//           ├────┼────┤              a block.
//   part 1  │ 2  │ 3  │
//           └────┴────┘ ... 16 parts of key_dim / 16 rows
// kRows: of a part, at most.
template <int kRows>
struct LinearHead {
  static constexpr int kFours = kRows / 4;
  struct Token {
    Four<float> q[kFours], k[kFours], v;
    float dt, beta;
  };

  const LinearShape& shape;
  int head, first_row, end_row, column;  // of the lane; column: the first of four
  Four<float> state[kRows];

  INGOT_DEVICE LinearHead(const LinearShape& of, int head, int column) : shape(of), head(head), column(column) {
    const int each = of.part_rows();
    first_row = threadIdx.x % kWarp / (kWarp / kKeyParts) * each, end_row = min(first_row + each, of.key_dim);
  }

  INGOT_DEVICE static Four<float> zeros() { return Four<float>{{0.f, 0.f, 0.f, 0.f}}; }
  // Four numbers of which those behind `count` are not there.
  INGOT_DEVICE static Four<float> load_some(const float* from, int count, bool whole) {
    if (whole) return count > 0 ? load_four(from) : zeros();
    Four<float> found = zeros();
    for (int i = 0; i < 4; ++i) {
      if (i < count) found.at[i] = from[i];
    }
    return found;
  }
  INGOT_DEVICE static void store_some(float* to, const Four<float>& values, int count, bool whole) {
    if (whole) {
      if (count > 0) store_four(to, values);
      return;
    }
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = values.at[i];
    }
  }

  INGOT_DEVICE void load(const float* slot) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i;
      const bool there = slot && row < end_row;
      state[i] = there
                     ? load_some(slot + shape.place(head, row, column), shape.value_dim - column, shape.whole_values())
                     : zeros();
    }
  }
  INGOT_DEVICE void store(float* slot) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i;
      if (row < end_row)
        store_some(slot + shape.place(head, row, column), state[i], shape.value_dim - column, shape.whole_values());
    }
  }

  // Numbers of the lane's rows of a key: all of them in fours, or one by one.
  INGOT_DEVICE void load_rows(Four<float> (&to)[kFours], const float* key, bool whole) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int row = first_row + 4 * i;
      to[i] = load_some(key + row, end_row - row, whole);
    }
  }

  INGOT_DEVICE Token token(const float* x, const float* dt, const float* beta, int64_t token) const {
    const LinearRow row(shape, x, token, head);
    const bool whole = shape.whole_keys();
    Token of;
    load_rows(of.q, row.q, whole), load_rows(of.k, row.k, whole);
    of.v = load_some(row.v + column, shape.value_dim - column, whole && shape.whole_values());
    of.dt = shape.by_dim ? 0.f : dt[token * shape.heads + head];
    of.beta = beta ? beta[token * shape.heads + head] : 0.f;
    return of;
  }

  INGOT_DEVICE float norm_factor(const Four<float> (&of)[kFours]) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) squares = fmaf(of[i / 4].at[i % 4], of[i / 4].at[i % 4], squares);
    return shape.norm_factor(sum_parts(squares));
  }

  // The state goes on by a token, whose result is left in its v. dts: of by_dim, of this token and head
  INGOT_DEVICE void go_on(Token& of, const float* dts, bool delta, float rate, float skip) {
    const float step = shape.step_of(of.dt);
    float q_factor = shape.scale, k_factor = 1.f;
    if (shape.l2_eps > 0.f) q_factor *= norm_factor(of.q), k_factor = norm_factor(of.k);
    const float decay = expf(-rate * step);
    Four<float> sum = zeros();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float& k = of.k[i / 4].at[i % 4];
      k *= k_factor;
      float keeps = decay;
      if (shape.by_dim) keeps = first_row + i < end_row ? expf(-rate * shape.step_of(dts[first_row + i])) : 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state[i].at[c] *= keeps;
        sum.at[c] = fmaf(k, state[i].at[c], sum.at[c]);
      }
    }
    const float share = delta ? sigmoid(of.beta) : step;
    Four<float> change;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      change.at[c] = share * (delta ? of.v.at[c] - sum_parts(sum.at[c]) : of.v.at[c]);
      sum.at[c] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state[i].at[c] = fmaf(of.k[i / 4].at[i % 4], change.at[c], state[i].at[c]);
        sum.at[c] = fmaf(of.q[i / 4].at[i % 4], state[i].at[c], sum.at[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) of.v.at[c] = fmaf(skip, of.v.at[c], sum_parts(sum.at[c]) * q_factor);
  }
};

template <int kRows>
INGOT_DEVICE void attend_linearly(float* y, const float* x, const float* dt, const float* beta, const float* a_log,
                                  const float* skip, const Item& run, const States& states, const LinearShape& shape) {
  constexpr bool kAhead = kRows <= 8;  // the next token is loaded while one is computed: registers have room for both
  using Head = LinearHead<kRows>;
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.z * kStripColumns + warp * kWarpColumns;
  if (first >= shape.value_dim) return;  // all lanes of a warp
  Head at(shape, head, first + 4 * (lane % (kWarpColumns / 4)));
  at.load(states.before(run));
  const float rate = expf(a_log[head]), own_skip = skip ? skip[head] : 0.f;
  typename Head::Token next = at.token(x, dt, beta, run.token);
  for (int index = 0; index < run.count; ++index) {
    const int64_t token = run.token + index;
    typename Head::Token of = next;
    if (kAhead && index + 1 < run.count) next = at.token(x, dt, beta, token + 1);
    at.go_on(of, dt + (token * shape.heads + head) * shape.key_dim, beta != nullptr, rate, own_skip);
    if (lane < kWarpColumns / 4) {
      float* to = y + (token * shape.heads + head) * shape.value_dim + at.column;
      Head::store_some(to, of.v, shape.value_dim - at.column, shape.whole_values());
    }
    if (float* slot = states.after(run, index)) at.store(slot);
    if (!kAhead && index + 1 < run.count) next = at.token(x, dt, beta, token + 1);
  }
}

// As the op linear_attention says. Grid: (sequences, heads, strips of 4 * 8 columns of a value). The kernels differ in
// the dims of a key that they have registers for: 128 and 256.
#define INGOT_LINEAR_KERNEL(name, rows)                                                                           \
  INGOT_KERNEL(kLinearThreads)                                                                                    \
  name(INGOT_LINEAR_PARAMETERS) {                                                                                 \
    wait_for_previous();                                                                                          \
    attend_linearly<rows>(y, x, dt, beta, a_log, skip, runs[blockIdx.x], INGOT_STATES_GIVEN, INGOT_LINEAR_SHAPE); \
  }
INGOT_LINEAR_KERNEL(linear_attention_128, 8)
INGOT_LINEAR_KERNEL(linear_attention_256, 16)
