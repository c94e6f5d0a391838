// Row by row: embedding, rotary angles, norms, epilogues of matrix products, gathers. Bound by memory.
#include "epilogue.cuh"

constexpr int kRowThreads = 256;

// How often a thread goes through a row, four columns at a time: what it loads in all rounds of a block of 2,048
// columns comes before what it stores, which might lie in the same place for all that the compiler knows.
constexpr int kStripFours = 2;
constexpr int kStrip = 4 * kStripFours * kRowThreads;

INGOT_DEVICE int column_of(int strip, int n) { return strip + 4 * static_cast<int>(n * kRowThreads + threadIdx.x); }

// out[t] = table[ids[t]] * scale (+ position_table[positions[t]]); one block per token. The id -1 - s stands for what
// the sequence in slot s drew last, drawn[s].
INGOT_KERNEL(kRowThreads)
embed(float* out, const Weight* table, const Weight* position_table, const int* ids, const int* drawn,
      const int* positions, int hidden, float scale) {
  wait_for_previous();
  const int64_t token = blockIdx.x;
  const int id = ids[token] < 0 ? drawn[-1 - ids[token]] : ids[token];
  const Weight* row = table + static_cast<int64_t>(id) * hidden;
  const Weight* place = position_table ? position_table + static_cast<int64_t>(positions[token]) * hidden : nullptr;
  if (hidden % 4 == 0) {
    for (int strip = 0; strip < hidden; strip += kStrip) {
      Four<Weight> values[kStripFours], places[kStripFours];
#pragma unroll
      for (int n = 0; n < kStripFours; ++n) {
        const int col = column_of(strip, n);
        if (col >= hidden) break;
        values[n] = load_four(row + col);
        if (place) places[n] = load_four(place + col);
      }
#pragma unroll
      for (int n = 0; n < kStripFours; ++n) {
        const int col = column_of(strip, n);
        if (col >= hidden) break;
        Four<float> sums;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums.at[i] = __fmul_rn(to_float(values[n].at[i]), scale);
          if (place) sums.at[i] += to_float(places[n].at[i]);
        }
        store_four(out + token * hidden + col, sums);
      }
    }
    return;
  }
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    float value = __fmul_rn(to_float(row[i]), scale);
    if (place) value += to_float(place[i]);
    out[token * hidden + i] = value;
  }
}

#ifdef INGOT_CODES

// The same from tables of codes: a row is a float32 scale, then bytes, up to a multiple of 4.
INGOT_DEVICE float scale_of(const unsigned char* row) { return *reinterpret_cast<const float*>(row); }
INGOT_DEVICE const signed char* codes_of(const unsigned char* row) {
  return reinterpret_cast<const signed char*>(row) + 4;
}

INGOT_KERNEL(kRowThreads)
embed_codes(float* out, const unsigned char* table, const unsigned char* position_table, const int* ids,
            const int* drawn, const int* positions, int hidden, float scale) {
  wait_for_previous();
  const int64_t token = blockIdx.x, bytes = 4 + (hidden + 3) / 4 * 4;
  const int id = ids[token] < 0 ? drawn[-1 - ids[token]] : ids[token];
  const unsigned char* row = table + id * bytes;
  const unsigned char* place = position_table ? position_table + positions[token] * bytes : nullptr;
  const float own = scale_of(row), places = place ? scale_of(place) : 0.f;
  const auto sum = [own, place, places, scale](int code, int other) {  // rounded as the specification rounds
    const float value = __fmul_rn(__fmul_rn(own, code), scale);
    return place ? __fadd_rn(value, __fmul_rn(places, other)) : value;
  };
  if (hidden % 4 == 0) {
    for (int i = column_of(0, 0); i < hidden; i += 4 * kRowThreads) {
      const Four<signed char> codes = load_four(codes_of(row) + i);
      const Four<signed char> others = place ? load_four(codes_of(place) + i) : Four<signed char>{{0, 0, 0, 0}};
      Four<float> sums;
#pragma unroll
      for (int k = 0; k < 4; ++k) sums.at[k] = sum(codes.at[k], others.at[k]);
      store_four(out + token * hidden + i, sums);
    }
    return;
  }
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    out[token * hidden + i] = sum(codes_of(row)[i], place ? codes_of(place)[i] : 0);
  }
}

#endif

// out[t] = [cos(angle) * scale, sin(angle) * scale], angle = positions[t] * inv_freq in float32; one block per token.
// The angle is reduced in double: sinf's own reduction of large angles would need local memory.
INGOT_KERNEL(kRowThreads)
rope_table(float* out, const float* inv_freq, const int* positions, int half, float scale) {
  wait_for_previous();
  constexpr double kInversePi = 0.318309886183790671537767526745;
  const int64_t token = blockIdx.x;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const float angle = __fmul_rn(static_cast<float>(positions[token]), inv_freq[i]);
    const double turns = angle * kInversePi;  // in half turns
    float sine, cosine;
    sincospif(static_cast<float>(turns - 2.0 * rint(turns * 0.5)), &sine, &cosine);
    out[token * 2 * half + i] = cosine * scale;
    out[token * 2 * half + half + i] = sine * scale;
  }
}

constexpr int kNormThreads = 1024;  // at most; bind.py chooses
constexpr int kNormFours = 2;       // of a thread

// A row in registers: four columns, then four that lie a whole block of threads behind them.
struct NormRow {
  Four<float> fours[kNormFours];

  INGOT_DEVICE static int column(int n) { return 4 * static_cast<int>(threadIdx.x + n * blockDim.x); }
  INGOT_DEVICE static NormRow load(const float* from, int hidden) {
    NormRow found;
#pragma unroll
    for (int n = 0; n < kNormFours; ++n) {
      found.fours[n] = from && column(n) < hidden ? load_four(from + column(n)) : Four<float>{{0.f, 0.f, 0.f, 0.f}};
    }
    return found;
  }
};

// See residual_norm. Everything is loaded before the first barrier, the row's weights before its values.
INGOT_DEVICE void norm_in_registers(void* y, float* sum, const float* x, const float* residual, const float* weight,
                                    const float* bias, int hidden, float eps, int layer, int narrow,
                                    float (&scratch)[2][kWarp]) {
  const NormRow weights = NormRow::load(weight, hidden), biases = NormRow::load(bias, hidden);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * hidden;
  const float share = 1.f / hidden;
  NormRow row = NormRow::load(x + begin, hidden);
  if (residual) {
    const NormRow others = NormRow::load(residual + begin, hidden);
#pragma unroll
    for (int n = 0; n < kNormFours; ++n) {
      for (int i = 0; i < 4; ++i) row.fours[n].at[i] += others.fours[n].at[i];
    }
  }
  float mean = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < kNormFours; ++n) {
    if (sum && NormRow::column(n) < hidden) store_four(sum + begin + NormRow::column(n), row.fours[n]);
    for (int i = 0; i < 4; ++i) mean += row.fours[n].at[i], squares += row.fours[n].at[i] * row.fours[n].at[i];
  }
  if (layer) {
    mean = block_sum_once(mean, scratch[1]) * share, squares = 0.f;
#pragma unroll
    for (int n = 0; n < kNormFours; ++n) {
      if (NormRow::column(n) >= hidden) break;
      for (int i = 0; i < 4; ++i) squares += (row.fours[n].at[i] - mean) * (row.fours[n].at[i] - mean);
    }
  } else {
    mean = 0.f;
  }
  const float factor = rsqrtf(block_sum_once(squares, scratch[0]) * share + eps);
#pragma unroll
  for (int n = 0; n < kNormFours; ++n) {
    if (NormRow::column(n) >= hidden) break;
    Four<float> values = row.fours[n];
    for (int i = 0; i < 4; ++i) {
      values.at[i] = (values.at[i] - mean) * factor * weights.fours[n].at[i];
      if (bias) values.at[i] += biases.fours[n].at[i];
    }
    store_activations(y, begin + NormRow::column(n), values, narrow);
  }
}

// total = x (+ residual), also written to `sum` if wanted, which may be the residual itself;
// layer 0: y = total / sqrt(mean(total^2) + eps) * weight
// layer 1: y = (total - mean) / sqrt(variance + eps) * weight (+ bias)
// One block per row. The row stays in registers, or, if it is too long or of no whole fours, in shared memory: hidden
// floats.
INGOT_KERNEL(kNormThreads)
residual_norm(void* y, float* sum, const float* x, const float* residual, const float* weight, const float* bias,
              int hidden, float eps, int layer, int narrow) {
  let_next_begin();
  wait_for_previous();
  INGOT_SHARED(shared);
  __shared__ float scratch[2][kWarp];
  const int threads = blockDim.x;
  if (hidden % 4 == 0 && hidden <= 4 * kNormFours * threads) {
    norm_in_registers(y, sum, x, residual, weight, bias, hidden, eps, layer, narrow, scratch);
    return;
  }
  float* row = reinterpret_cast<float*>(shared);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * hidden;
  float total = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i < hidden; i += threads) {
    const float value = residual ? x[begin + i] + residual[begin + i] : x[begin + i];
    if (sum) sum[begin + i] = value;
    row[i] = value;  // read again by this thread alone
    total += value;
    squares += value * value;
  }
  float mean = 0.f;
  if (layer) {
    mean = block_sum_once(total, scratch[1]) / hidden;
    squares = 0.f;
    for (int i = threadIdx.x; i < hidden; i += threads) squares += (row[i] - mean) * (row[i] - mean);
  }
  const float factor = 1.f / sqrtf(block_sum_once(squares, scratch[0]) / hidden + eps);
  for (int i = threadIdx.x; i < hidden; i += threads) {
    float value = (row[i] - mean) * factor * weight[i];
    if (bias) value += bias[i];
    store_activation(y, begin + i, value, narrow);
  }
}

// y = activation(x + bias) (* (up + up_bias)) (+ residual); also a plain sum, and a change of type.
// x and up have `ld` columns, y and residual `cols`; a y that is not narrow may be x, up or the residual.
// Grid: (rows, strips of 8 * 256 columns); four blocks on a multiprocessor load while others compute
INGOT_KERNEL_TO_SHARE(kRowThreads, 4)
epilogue(void* y, const float* x, const float* up, const float* bias, const float* up_bias, const float* residual,
         int cols, int ld, int kind, int narrow) {
  wait_for_previous();
  const Epilogue to{y, bias, up_bias, residual, cols, kind, narrow};
  const int64_t row = blockIdx.x, begin = row * ld;
  const int strip = blockIdx.y * kStrip;
  if (cols % 4 == 0 && ld % 4 == 0) {
    FourTerms terms[kStripFours];
#pragma unroll
    for (int n = 0; n < kStripFours; ++n) {
      const int col = column_of(strip, n);
      if (col < cols) to.load_biases(terms[n], col);
    }
#pragma unroll
    for (int n = 0; n < kStripFours; ++n) {
      const int col = column_of(strip, n);
      if (col < cols) to.load_values(terms[n], row, col, x + begin + col, up ? up + begin + col : nullptr);
    }
#pragma unroll
    for (int n = 0; n < kStripFours; ++n) {
      const int col = column_of(strip, n);
      if (col < cols) to.write_four(row, col, terms[n], up != nullptr);
    }
    return;
  }
  for (int i = strip + threadIdx.x; i < min(cols, strip + kStrip); i += kRowThreads) {
    if (up) {
      to.write_gated(row, i, x[begin + i], up[begin + i]);
    } else {
      to.write(row, i, x[begin + i]);
    }
  }
}

// y[r] = x[rows[r]]; one block per row of y
INGOT_KERNEL(kRowThreads)
gather_rows(float* y, const float* x, const int* rows, int cols) {
  wait_for_previous();
  const int64_t to = blockIdx.x, from = rows[blockIdx.x];
  if (cols % 4 == 0) {
    for (int strip = 0; strip < cols; strip += kStrip) {
      Four<float> values[kStripFours];
#pragma unroll
      for (int n = 0; n < kStripFours; ++n) {
        if (column_of(strip, n) < cols) values[n] = load_four(x + from * cols + column_of(strip, n));
      }
#pragma unroll
      for (int n = 0; n < kStripFours; ++n) {
        if (column_of(strip, n) < cols) store_four(y + to * cols + column_of(strip, n), values[n]);
      }
    }
    return;
  }
  for (int i = threadIdx.x; i < cols; i += kRowThreads) y[to * cols + i] = x[from * cols + i];
}

// y = f(x, x2) for a strip of 4 * 256 columns of a row, element by element; y may be x. x2: null, then zero
template <class F>
INGOT_DEVICE void map_strip(float* y, const float* x, const float* x2, int cols, F f) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * cols;
  const int strip = blockIdx.y * 4 * kRowThreads, col = column_of(strip, 0);
  if (cols % 4 == 0) {
    if (col >= cols) return;
    Four<float> values = load_four(x + begin + col);
    const Four<float> others = x2 ? load_four(x2 + begin + col) : Four<float>{{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < 4; ++i) values.at[i] = f(values.at[i], others.at[i]);
    store_four(y + begin + col, values);
    return;
  }
  for (int i = strip + threadIdx.x; i < min(cols, strip + 4 * kRowThreads); i += kRowThreads) {
    y[begin + i] = f(x[begin + i], x2 ? x2[begin + i] : 0.f);
  }
}

// y = cap * tanh(x / cap); y may be x. Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRowThreads)
soft_cap(float* y, const float* x, int cols, float cap) {
  wait_for_previous();
  map_strip(y, x, nullptr, cols, [cap](float value, float) { return cap * tanhf(value / cap); });
}

// y = factor * x; y may be x. Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRowThreads)
scale_rows(float* y, const float* x, int cols, float factor) {
  wait_for_previous();
  map_strip(y, x, nullptr, cols, [factor](float value, float) { return factor * value; });
}

// y = a + b * sigmoid(gate), a gate for each row; y may be a. Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRowThreads)
add_gated(float* y, const float* a, const float* b, const float* gate, int cols) {
  wait_for_previous();
  const float divisor = 1.f + expf(-gate[blockIdx.x]);
  map_strip(y, a, b, cols, [divisor](float one, float other) { return one + other / divisor; });
}

// y = x * sigmoid(gate); y may be x or the gate where it is not narrow. Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRowThreads)
gate_rows(void* y, const float* x, const float* gate, int cols, int narrow) {
  wait_for_previous();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * cols;
  const int strip = blockIdx.y * 4 * kRowThreads, col = column_of(strip, 0);
  const auto gated = [](float value, float by) { return value / (1.f + expf(-by)); };
  if (cols % 4 == 0) {
    if (col >= cols) return;
    Four<float> values = load_four(x + begin + col);
    const Four<float> gates = load_four(gate + begin + col);
#pragma unroll
    for (int i = 0; i < 4; ++i) values.at[i] = gated(values.at[i], gates.at[i]);
    store_activations(y, begin + col, values, narrow);
    return;
  }
  for (int i = strip + threadIdx.x; i < min(cols, strip + 4 * kRowThreads); i += kRowThreads) {
    store_activation(y, begin + i, gated(x[begin + i], gate[begin + i]), narrow);
  }
}

#ifdef INGOT_FP8

constexpr float kLargestFp8 = 448.f;
constexpr uint32_t kInfinite = 0x7f800000u;  // bits of a magnitude; those of NaN are larger

INGOT_DEVICE uint32_t warp_highest(uint32_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Four columns of a row; zeros behind its end.
INGOT_DEVICE Four<float> four_of(const float* row, int col, int k) {
  if (k % 4 == 0 && col < k) return load_four(row + col);
  Four<float> found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.at[i] = col + i < k ? row[col + i] : 0.f;
  return found;
}
// Bits of the largest magnitude.
INGOT_DEVICE uint32_t highest_of(const Four<float>& values) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found = max(found, __float_as_uint(values.at[i]) & 0x7fffffffu);
  return found;
}

// How numbers become codes: by `inverse`, or all of them zeros. `scale` is NaN where one of them is not finite.
struct Fp8Scale {
  float inverse, scale;

  // highest: bits of the largest magnitude
  INGOT_DEVICE static Fp8Scale of(uint32_t highest) {
    const float top = __uint_as_float(highest), inverse = __fdiv_rn(kLargestFp8, top);
    const bool finite = highest < kInfinite, usable = finite && __float_as_uint(inverse) < kInfinite;
    return {usable ? inverse : 0.f, finite ? __fdiv_rn(top, kLargestFp8) : __uint_as_float(0x7fffffffu)};
  }
  INGOT_DEVICE uint32_t codes(const Four<float>& values) const {
    if (inverse == 0.f) return 0;
    float number[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) number[i] = __fmul_rn(values.at[i], inverse);
    return pack_fp8(number[0], number[1]) | pack_fp8(number[2], number[3]) << 16;
  }
};

// The op `round_to_fp8`: codes [rows][filled], zeros behind k, and scales [rows]; with groups (of 128 columns)
// [rows][groups]. filled: k up to a multiple of 128. Grid: (rows, 1), with groups (rows, strips of kFp8Strip columns),
// of which a warp computes a group.
constexpr int kFp8Strip = 4 * kRowThreads;

INGOT_KERNEL(kRowThreads)
round_to_fp8(unsigned char* codes, float* scales, const float* x, int k, int filled, int group) {
  let_next_begin();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const float* from = x + row * k;
  uint32_t* to = reinterpret_cast<uint32_t*>(codes + row * filled);
  if (group) {
    const int col = blockIdx.y * kFp8Strip + 4 * threadIdx.x;
    if (col >= filled) return;  // as all lanes of its warp
    const Four<float> values = four_of(from, col, k);
    const Fp8Scale scale = Fp8Scale::of(warp_highest(highest_of(values)));
    to[col / 4] = scale.codes(values);
    if (threadIdx.x % kWarp == 0) scales[row * (filled / group) + col / group] = scale.scale;
    return;
  }
  __shared__ uint32_t of_warps[kRowThreads / kWarp];
  uint32_t highest = 0;
  for (int col = 4 * threadIdx.x; col < filled; col += kFp8Strip) {
    highest = max(highest, highest_of(four_of(from, col, k)));
  }
  highest = warp_highest(highest);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = highest;
  __syncthreads();
  highest = warp_highest(of_warps[threadIdx.x % (kRowThreads / kWarp)]);
  const Fp8Scale scale = Fp8Scale::of(highest);
  for (int col = 4 * threadIdx.x; col < filled; col += kFp8Strip) to[col / 4] = scale.codes(four_of(from, col, k));
  if (threadIdx.x == 0) scales[row] = scale.scale;
}

#endif
