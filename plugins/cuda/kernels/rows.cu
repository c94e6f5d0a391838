// Row by row: embedding, rotary angles, norms, epilogues of matrix products, gathers. Bound by memory.
#include "epilogue.cuh"

constexpr int kRowThreads = 256;

// out[t] = table[ids[t]] * scale (+ position_table[positions[t]]); one block per token. The id -1 - s stands for what
// the sequence in slot s drew last, drawn[s].
INGOT_KERNEL(kRowThreads)
embed(float* out, const Weight* table, const Weight* position_table, const int* ids, const int* drawn,
      const int* positions, int hidden, float scale) {
  const int64_t token = blockIdx.x;
  const int id = ids[token] < 0 ? drawn[-1 - ids[token]] : ids[token];
  const Weight* row = table + static_cast<int64_t>(id) * hidden;
  const Weight* place = position_table ? position_table + static_cast<int64_t>(positions[token]) * hidden : nullptr;
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    float value = to_float(row[i]) * scale;
    if (place) value += to_float(place[i]);
    out[token * hidden + i] = value;
  }
}

#ifdef INGOT_CODES

// The same from tables of codes: a row is a float32 scale, then bytes, up to a multiple of 4.
INGOT_DEVICE float code_of(const unsigned char* row, int i) {
  return *reinterpret_cast<const float*>(row) * static_cast<signed char>(row[4 + i]);
}

INGOT_KERNEL(kRowThreads)
embed_codes(float* out, const unsigned char* table, const unsigned char* position_table, const int* ids,
            const int* drawn, const int* positions, int hidden, float scale) {
  const int64_t token = blockIdx.x, bytes = 4 + (hidden + 3) / 4 * 4;
  const int id = ids[token] < 0 ? drawn[-1 - ids[token]] : ids[token];
  const unsigned char* row = table + id * bytes;
  const unsigned char* place = position_table ? position_table + positions[token] * bytes : nullptr;
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    float value = code_of(row, i) * scale;
    if (place) value += code_of(place, i);
    out[token * hidden + i] = value;
  }
}

#endif

// out[t] = [cos(angle) * scale, sin(angle) * scale], angle = positions[t] * inv_freq in float32; one block per token.
// The angle is reduced in double: sinf's own reduction of large angles would need local memory.
INGOT_KERNEL(kRowThreads)
rope_table(float* out, const float* inv_freq, const int* positions, int half, float scale) {
  constexpr double kInversePi = 0.318309886183790671537767526745;
  const int64_t token = blockIdx.x;
  for (int i = threadIdx.x; i < half; i += kRowThreads) {
    const float angle = __fmul_rn(static_cast<float>(positions[token]), inv_freq[i]);
    const double turns = angle * kInversePi;  // in half turns
    float sine, cosine;
    sincospif(static_cast<float>(turns - 2.0 * rint(turns * 0.5)), &sine, &cosine);
    out[token * 2 * half + i] = cosine * scale;
    out[token * 2 * half + half + i] = sine * scale;
  }
}

// total = x (+ residual), also written to `sum` if wanted, which may be the residual itself;
// layer 0: y = total / sqrt(mean(total^2) + eps) * weight
// layer 1: y = (total - mean) / sqrt(variance + eps) * weight (+ bias)
// One block per row; the row stays in shared memory: hidden floats.
INGOT_KERNEL(kRowThreads)
residual_norm(void* y, float* sum, const float* x, const float* residual, const float* weight, const float* bias,
              int hidden, float eps, int layer, int narrow) {
  INGOT_SHARED(shared);
  __shared__ float scratch[kRowThreads / kWarp];
  float* row = reinterpret_cast<float*>(shared);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * hidden;
  float total = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    const float value = residual ? x[begin + i] + residual[begin + i] : x[begin + i];
    if (sum) sum[begin + i] = value;
    row[i] = value;  // read again by this thread alone
    total += value;
    squares += value * value;
  }
  float mean = 0.f;
  if (layer) {
    mean = block_sum<kRowThreads>(total, scratch) / hidden;
    squares = 0.f;
    for (int i = threadIdx.x; i < hidden; i += kRowThreads) squares += (row[i] - mean) * (row[i] - mean);
  }
  const float factor = 1.f / sqrtf(block_sum<kRowThreads>(squares, scratch) / hidden + eps);
  for (int i = threadIdx.x; i < hidden; i += kRowThreads) {
    float value = (row[i] - mean) * factor * weight[i];
    if (bias) value += bias[i];
    store_activation(y, begin + i, value, narrow);
  }
}

// y = activation(x + bias) (* (up + up_bias)) (+ residual); also a plain sum, and a change of type.
// x and up have `ld` columns, y and residual `cols`; a y that is not narrow may be x, up or the residual.
// Grid: (rows, strips of 4 * 256 columns)
INGOT_KERNEL(kRowThreads)
epilogue(void* y, const float* x, const float* up, const float* bias, const float* up_bias, const float* residual,
         int cols, int ld, int kind, int narrow) {
  const Epilogue to{y, bias, up_bias, residual, cols, kind, narrow};
  const int64_t row = blockIdx.x;
  const int first = blockIdx.y * 4 * kRowThreads + threadIdx.x;
#pragma unroll
  for (int strip = 0; strip < 4; ++strip) {
    const int i = first + strip * kRowThreads;
    if (i >= cols) return;
    if (up) {
      to.write_gated(row, i, x[row * ld + i], up[row * ld + i]);
    } else {
      to.write(row, i, x[row * ld + i]);
    }
  }
}

// y[r] = x[rows[r]]; one block per row of y
INGOT_KERNEL(kRowThreads)
gather_rows(float* y, const float* x, const int* rows, int cols) {
  const int64_t to = blockIdx.x, from = rows[blockIdx.x];
  for (int i = threadIdx.x; i < cols; i += kRowThreads) y[to * cols + i] = x[from * cols + i];
}

// y = cap * tanh(x / cap); y may be x. Grid: (rows, strips of 256 columns)
INGOT_KERNEL(kRowThreads)
soft_cap(float* y, const float* x, int cols, float cap) {
  const int i = blockIdx.y * kRowThreads + threadIdx.x;
  const int64_t row = blockIdx.x;
  if (i < cols) y[row * cols + i] = cap * tanhf(x[row * cols + i] / cap);
}

// y = factor * x; y may be x. Grid: (rows, strips of 256 columns)
INGOT_KERNEL(kRowThreads)
scale_rows(float* y, const float* x, int cols, float factor) {
  const int i = blockIdx.y * kRowThreads + threadIdx.x;
  const int64_t row = blockIdx.x;
  if (i < cols) y[row * cols + i] = factor * x[row * cols + i];
}

// y = a + b * sigmoid(gate), a gate for each row; y may be a. Grid: (rows, strips of 256 columns)
INGOT_KERNEL(kRowThreads)
add_gated(float* y, const float* a, const float* b, const float* gate, int cols) {
  const int i = blockIdx.y * kRowThreads + threadIdx.x;
  const int64_t row = blockIdx.x;
  if (i < cols) y[row * cols + i] = a[row * cols + i] + b[row * cols + i] / (1.f + expf(-gate[row]));
}
