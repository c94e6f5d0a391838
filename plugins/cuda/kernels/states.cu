// Layers that keep a state: short convolutions, linear attention, and the norm behind both.
#include "states.cuh"
#ifdef INGOT_STATES
#include "linear_decode.cuh"
#include "linear_prompts.cuh"
#endif

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

// The tokens of a run behind which its state is left: the last one of each block, and of the run.
struct RunEnds {
  int count, first, last;  // ends; tokens of the run

  INGOT_DEVICE explicit RunEnds(const Item& run)
      : first(min(run.count, States::until_end(run.position)) - 1), last(run.count - 1) {
    count = 1 + (last - first + kBlockTokens - 1) / kBlockTokens;
  }
  INGOT_DEVICE int at(int number) const { return min(last, first + number * kBlockTokens); }
};

// Blocks side by side take the ends in turn. The first block alone leaves states that hold inputs of the state before,
// and those that lie in its place, one after the other: what one overwrites the next one reads there.
template <int kCount>
INGOT_DEVICE void leave(const float* x, const Item& run, const States& states, int channels, int width, int channel) {
  const RunEnds ends(run);
  const float* const before = states.before(run);
  const bool in_turn = ends.first < width - 1;  // some hold inputs of the state before
  const auto place = [&](int number) {          // null also where a later state takes the place
    float* to = states.after(run, ends.at(number));
    for (int later = number + 1; to && later < ends.count; ++later) {
      if (states.after(run, ends.at(later)) == to) to = nullptr;
    }
    return to;
  };
  const auto waits = [&](int number, const float* to) { return ends.at(number) < width - 1 || to == before; };
  const auto leave_one = [&](int number, float* to, int first, const float* held) {
    const ConvInputs<kCount> inputs{x + static_cast<int64_t>(run.token + first) * channels, held, channels, width};
    for (int j = 1; j < width; ++j) {  // what it overwrites has been read
      const int index = ends.at(number) - first - width + 1 + j;
      inputs.at(index, channel).store(to + static_cast<int64_t>(j - 1) * channels + channel);
    }
  };
  for (int number = blockIdx.z; number < ends.count; number += gridDim.z) {
    float* to = place(number);
    if (to && !(in_turn && waits(number, to))) leave_one(number, to, 0, before);
  }
  if (!in_turn || blockIdx.z) return;
  const float* held = before;
  int first = 0;  // token of the run behind that which `held` is the state of
  for (int number = 0; number < ends.count; ++number) {
    float* to = place(number);
    if (!to || !waits(number, to)) continue;
    leave_one(number, to, first, held);
    held = to, first = ends.at(number) + 1;
  }
}

// The last inputs of each sequence, and those at the ends of its blocks, become states. Grid: (sequences, strips,
// blocks that share the ends)
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

#endif
