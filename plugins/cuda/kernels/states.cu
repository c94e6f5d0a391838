// Layers that keep a state: short convolutions, linear attention (the gated delta rule, Mamba 2), and the norm behind
// it. A state is carried on token by token, so that a sequence has the same bits in chunks of any length.
//
//   slot: the states of all such layers after some token of a sequence, float32. The block table of their cache group
//   says in which slot the state lies after the last token of a block, or after the last token of a step; -1 keeps
//   none.
#include "paged_attention.cuh"

constexpr int kNormGroupThreads = 1024;  // at most; bind.py chooses

// norm_first: y = norm(x) * weight * activation(gate); else y = norm(x * activation(gate)) * weight. A norm is over
// `columns` of a row's `cols`; own_weight: each column of the row has a weight, else each of a group. y may be x or the
// gate where it is not narrow. Grid: (rows, groups)
INGOT_KERNEL(kNormGroupThreads)
gated_norm(void* y, const float* x, const float* gate, const float* weight, int cols, int columns, float eps,
           int norm_first, int sigmoid, int own_weight, int narrow) {
  wait_for_previous();
  __shared__ float scratch[kWarp];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * cols + static_cast<int64_t>(blockIdx.y) * columns;
  const float* weights = own_weight ? weight + static_cast<int64_t>(blockIdx.y) * columns : weight;
  const int threads = blockDim.x;
  const auto active = [sigmoid](float by) { return (sigmoid ? 1.f : by) / (1.f + expf(-by)); };
  float squares = 0.f;
  const auto add = [&](float value, float by) {
    const float total = norm_first ? value : value * active(by);
    squares += total * total;
  };
  const auto result = [&](float value, float by, float factor, float own) { return value * active(by) * factor * own; };
  if (columns % 4 == 0) {
    for (int i = 4 * threadIdx.x; i < columns; i += 4 * threads) {
      const Four<float> values = load_four(x + begin + i);
      const Four<float> by = norm_first ? Four<float>{{0.f, 0.f, 0.f, 0.f}} : load_four(gate + begin + i);
      for (int k = 0; k < 4; ++k) add(values.at[k], by.at[k]);
    }
    const float factor = rsqrtf(block_sum_once(squares, scratch) / columns + eps);
    for (int i = 4 * threadIdx.x; i < columns; i += 4 * threads) {
      Four<float> values = load_four(x + begin + i);
      const Four<float> by = load_four(gate + begin + i), own = load_four(weights + i);
      for (int k = 0; k < 4; ++k) values.at[k] = result(values.at[k], by.at[k], factor, own.at[k]);
      store_activations(y, begin + i, values, narrow);
    }
    return;
  }
  for (int i = threadIdx.x; i < columns; i += threads) add(x[begin + i], norm_first ? 0.f : gate[begin + i]);
  const float factor = rsqrtf(block_sum_once(squares, scratch) / columns + eps);
  for (int i = threadIdx.x; i < columns; i += threads) {
    store_activation(y, begin + i, result(x[begin + i], gate[begin + i], factor, weights[i]), narrow);
  }
}

#ifdef INGOT_STATES

// The slots of one layer. Runs: the tokens that a step has of each sequence.
struct States {
  float* slots;       // where slot 0 has the layer's numbers
  const int* tables;  // [sequences][table_width]
  int table_width;
  int slot_size;  // numbers from a slot to the next one

  // Behind the token at a position; null: nowhere.
  INGOT_DEVICE float* at(const Item& run, int position) const {
    const int slot = tables[static_cast<int64_t>(run.sequence) * table_width + position / kBlockTokens];
    return slot < 0 ? nullptr : slots + static_cast<int64_t>(slot) * slot_size;
  }
  // What a run starts from; null: zeros.
  INGOT_DEVICE const float* before(const Item& run) const { return run.position ? at(run, run.position - 1) : nullptr; }
  // Where the state is left behind token `index` of a run, at the ends of blocks and of the run; null: nowhere.
  INGOT_DEVICE float* after(const Item& run, int index) const {
    const int position = run.position + index;
    const bool ends = index + 1 == run.count || position % kBlockTokens == kBlockTokens - 1;
    return ends ? at(run, position) : nullptr;
  }
};

#define INGOT_STATES_PARAMETERS const Item *runs, float *slots, const int *tables, int table_width, int slot_size
#define INGOT_STATES_GIVEN \
  States { slots, tables, table_width, slot_size }

constexpr int kStateThreads = 256;

// Neighbours in a row: four, which one access moves, or one.
template <int kCount>
struct Neighbours {
  float at[kCount];

  INGOT_DEVICE static Neighbours load(const float* from) {
    Neighbours found;
    if constexpr (kCount == 4) {
      const Four<float> four = load_four(from);
      for (int i = 0; i < 4; ++i) found.at[i] = four.at[i];
    } else {
      found.at[0] = *from;
    }
    return found;
  }
  INGOT_DEVICE void store(float* to) const {
    if constexpr (kCount == 4) {
      store_four(to, Four<float>{{at[0], at[1], at[2], at[3]}});
    } else {
      *to = at[0];
    }
  }
};

// What both kernels of a convolution see of a run: its inputs [tokens][channels], before them those that the state
// holds, [width - 1][channels], the oldest first.
template <int kCount>
struct ConvInputs {
  const float* x;  // of the run's first token
  const float* before;
  int channels;
  int width;

  // Of token `index`, at a channel; negative ones are of the state.
  INGOT_DEVICE Neighbours<kCount> at(int index, int channel) const {
    const int64_t row = index < 0 ? width - 1 + index : index;
    if (index >= 0) return Neighbours<kCount>::load(x + row * channels + channel);
    return before ? Neighbours<kCount>::load(before + row * channels + channel) : Neighbours<kCount>{};
  }
};

template <int kCount>
INGOT_DEVICE void convolve(float* y, const float* x, const float* weight, const float* bias, const Item& run,
                           const States& states, int channels, int width, int silu, int leaves, int channel) {
  const int64_t token = blockIdx.x;
  const int index = static_cast<int>(token) - run.token;
  const ConvInputs<kCount> inputs{x + static_cast<int64_t>(run.token) * channels, states.before(run), channels, width};
  float* left = leaves ? states.after(run, 0) : nullptr;
  Neighbours<kCount> sum = bias ? Neighbours<kCount>::load(bias + channel) : Neighbours<kCount>{};
#pragma unroll 4
  for (int j = 0; j < width; ++j) {
    const auto factors = Neighbours<kCount>::load(weight + static_cast<int64_t>(j) * channels + channel);
    const auto values = inputs.at(index - width + 1 + j, channel);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.at[i] = fmaf(factors.at[i], values.at[i], sum.at[i]);
    if (left && j > 0) values.store(left + static_cast<int64_t>(j - 1) * channels + channel);  // it was read before
  }
  if (silu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.at[i] = sum.at[i] / (1.f + expf(-sum.at[i]));
  }
  sum.store(y + token * channels + channel);
}

// y[t, c] = activation(bias[c] + sum over j of weight[j, c] * x[t - width + 1 + j, c]). leaves: every run is one token,
// and the state behind it is left; else leave_inputs follows. Grid: (tokens, strips of 4 * 256 channels)
INGOT_KERNEL(kStateThreads)
causal_conv(float* y, const float* x, const float* weight, const float* bias, const int* sequences,
            INGOT_STATES_PARAMETERS, int channels, int width, int silu, int leaves) {
  wait_for_previous();
  const Item run = runs[sequences[blockIdx.x]];
  const States states = INGOT_STATES_GIVEN;
  const int strip = blockIdx.y * 4 * kStateThreads;
  if (channels % 4 == 0) {
    const int channel = strip + 4 * threadIdx.x;
    if (channel >= channels) return;
    convolve<4>(y, x, weight, bias, run, states, channels, width, silu, leaves, channel);
    return;
  }
  for (int channel = strip + threadIdx.x; channel < min(channels, strip + 4 * kStateThreads);
       channel += kStateThreads) {
    convolve<1>(y, x, weight, bias, run, states, channels, width, silu, leaves, channel);
  }
}

template <int kCount>
INGOT_DEVICE void leave(const float* x, const Item& run, const States& states, int channels, int width, int channel) {
  const float* before = states.before(run);
  int first = 0;  // token of the run behind that which `before` holds the state of
  for (int last = min(run.count, kBlockTokens - run.position % kBlockTokens) - 1; last < run.count;
       last = min(run.count - 1, last + kBlockTokens)) {
    if (float* to = states.after(run, last)) {
      const ConvInputs<kCount> inputs{x + static_cast<int64_t>(run.token + first) * channels, before, channels, width};
      for (int j = 1; j < width; ++j) {  // what it overwrites has been read
        inputs.at(last - first - width + 1 + j, channel).store(to + static_cast<int64_t>(j - 1) * channels + channel);
      }
      before = to, first = last + 1;
    }
    if (last == run.count - 1) return;
  }
}

// The last inputs of each sequence, and those at the ends of its blocks, become states. Grid: (sequences, strips)
INGOT_KERNEL(kStateThreads)
leave_inputs(const float* x, INGOT_STATES_PARAMETERS, int channels, int width) {
  wait_for_previous();
  const Item run = runs[blockIdx.x];
  const States states = INGOT_STATES_GIVEN;
  const int strip = blockIdx.y * 4 * kStateThreads;
  if (channels % 4 == 0) {
    const int channel = strip + 4 * threadIdx.x;
    if (channel < channels) leave<4>(x, run, states, channels, width, channel);
    return;
  }
  for (int channel = strip + threadIdx.x; channel < min(channels, strip + 4 * kStateThreads);
       channel += kStateThreads) {
    leave<1>(x, run, states, channels, width, channel);
  }
}

// Linear attention: a warp has 8 columns of a head's state [key_dim][value_dim] in its registers while it goes through
// the tokens of a sequence. Lane 2 * p + c holds columns 4 * c to 4 * c + 3 of part p of the rows.
//
//            8 columns               A token reads its key and query (each lane those of its rows) and value, sums over
//           ┌────┬────┐              rows by shuffles, and needs no barrier. A state is read and written once for all
//   part 0  │ 0  │ 1  │ lanes        tokens of a step, 16 bytes at an access, 128 bytes of each row by the four warps
//   of
//           ├────┼────┤              a block.
//   part 1  │ 2  │ 3  │
//           └────┴────┘ ... 16 parts of key_dim / 16 rows
constexpr int kLinearThreads = 128, kKeyParts = 16, kWarpColumns = 8;

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
};

INGOT_DEVICE float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// The sum over the parts of a warp.
INGOT_DEVICE float sum_parts(float value) {
#pragma unroll
  for (int step = kWarp / 2; step >= kWarp / kKeyParts; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

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
    const int each = (of.key_dim + 4 * kKeyParts - 1) / (4 * kKeyParts) * 4;
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

  INGOT_DEVICE int64_t place(int row) const {  // in a slot
    return (static_cast<int64_t>(head) * shape.key_dim + row) * shape.value_dim + column;
  }
  INGOT_DEVICE bool whole_values() const { return shape.value_dim % 4 == 0; }

  INGOT_DEVICE void load(const float* slot) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i;
      const bool there = slot && row < end_row;
      state[i] = there ? load_some(slot + place(row), shape.value_dim - column, whole_values()) : zeros();
    }
  }
  INGOT_DEVICE void store(float* slot) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i;
      if (row < end_row) store_some(slot + place(row), state[i], shape.value_dim - column, whole_values());
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
    const int keys = shape.key_heads * shape.key_dim, values = shape.heads * shape.value_dim;
    const int key_head = head / (shape.heads / shape.key_heads);
    const float* row = x + token * (2 * keys + values);
    const float* k = row + (shape.values_first ? values : keys);
    const float* q = shape.values_first ? k + keys : row;
    const float* v = shape.values_first ? row : row + 2 * keys;
    const bool whole = shape.key_dim % 4 == 0 && values % 4 == 0;
    Token of;
    load_rows(of.q, q + key_head * shape.key_dim, whole), load_rows(of.k, k + key_head * shape.key_dim, whole);
    of.v = load_some(v + head * shape.value_dim + column, shape.value_dim - column, whole && whole_values());
    of.dt = shape.by_dim ? 0.f : dt[token * shape.heads + head];
    of.beta = beta ? beta[token * shape.heads + head] : 0.f;
    return of;
  }

  INGOT_DEVICE float step_of(float dt) const { return fminf(fmaxf(softplus(dt), shape.dt_min), shape.dt_max); }

  INGOT_DEVICE float norm_factor(const Four<float> (&of)[kFours]) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) squares += of[i / 4].at[i % 4] * of[i / 4].at[i % 4];
    return 1.f / sqrtf(sum_parts(squares) + shape.l2_eps);
  }

  // The state goes on by a token, whose result is left in its v. dts: of by_dim, of this token and head
  INGOT_DEVICE void go_on(Token& of, const float* dts, bool delta, float rate, float skip) {
    const float step = step_of(of.dt);
    float q_factor = shape.scale, k_factor = 1.f;
    if (shape.l2_eps > 0.f) q_factor *= norm_factor(of.q), k_factor = norm_factor(of.k);
    const float decay = expf(-rate * step);
    Four<float> sum = zeros();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float& k = of.k[i / 4].at[i % 4];
      k *= k_factor;
      float keeps = decay;
      if (shape.by_dim) keeps = first_row + i < end_row ? expf(-rate * step_of(dts[first_row + i])) : 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state[i].at[c] *= keeps;
        sum.at[c] = fmaf(k, state[i].at[c], sum.at[c]);
      }
    }
    const float share = delta ? 1.f / (1.f + expf(-of.beta)) : step;
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
  const int first = (blockIdx.z * (kLinearThreads / kWarp) + warp) * kWarpColumns;
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
      Head::store_some(to, of.v, shape.value_dim - at.column, at.whole_values());
    }
    if (float* slot = states.after(run, index)) at.store(slot);
    if (!kAhead && index + 1 < run.count) next = at.token(x, dt, beta, token + 1);
  }
}

// As the op linear_attention says. Grid: (sequences, heads, strips of 4 * 8 columns of a value). The kernels differ in
// the dims of a key that they have registers for: 128 and 256.
#define INGOT_LINEAR_KERNEL(name, rows)                                                                             \
  INGOT_KERNEL(kLinearThreads)                                                                                      \
  name(float* y, const float* x, const float* dt, const float* beta, const float* a_log, const float* skip,         \
       INGOT_STATES_PARAMETERS, int heads, int key_heads, int key_dim, int value_dim, int values_first, int by_dim, \
       float scale, float l2_eps, float dt_min, float dt_max) {                                                     \
    wait_for_previous();                                                                                            \
    const LinearShape shape{                                                                                        \
        heads, key_heads, key_dim, value_dim, values_first, by_dim, scale, l2_eps, dt_min, dt_max};                 \
    attend_linearly<rows>(y, x, dt, beta, a_log, skip, runs[blockIdx.x], INGOT_STATES_GIVEN, shape);                \
  }
INGOT_LINEAR_KERNEL(linear_attention_128, 8)
INGOT_LINEAR_KERNEL(linear_attention_256, 16)

#endif
