// What follows a matrix product, element by element: bias, activation, gate, residual, and the type of the result.
#pragma once

#include "device.cuh"

enum Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

INGOT_DEVICE float activate(float x, int kind) {
  switch (kind) {
    case kSilu:
      return x / (1.f + expf(-x));
    case kGelu:
      return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    case kGeluTanh:
      return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kRelu:
      return fmaxf(x, 0.f);
    case kRelu2:
      return fmaxf(x, 0.f) * fmaxf(x, 0.f);
    default:
      return x;
  }
}

template <int kKind>
INGOT_DEVICE Four<float> activate_four(Four<float> x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.at[i] = activate(x.at[i], kKind);
  return x;
}
INGOT_DEVICE Four<float> activate_four(const Four<float>& x, int kind) {
  switch (kind) {
    case kSilu:
      return activate_four<kSilu>(x);
    case kGelu:
      return activate_four<kGelu>(x);
    case kGeluTanh:
      return activate_four<kGeluTanh>(x);
    case kRelu:
      return activate_four<kRelu>(x);
    case kRelu2:
      return activate_four<kRelu2>(x);
    default:
      return x;
  }
}
INGOT_DEVICE Four<float> add_four(Four<float> a, const Four<float>& b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a.at[i] = __fadd_rn(a.at[i], b.at[i]);
  return a;
}

// What an epilogue takes for four neighbours of a row.
struct FourTerms {
  Four<float> bias, up_bias, x, up, residual;
};

// y = activation(x + bias) (* (up + up_bias)) (+ residual). Addresses are null where there is nothing. No sum here may
// be contracted with a product before it: every kernel must give the same bits.
struct Epilogue {
  void* y;                // [rows][cols]
  const float* bias;      // [cols]
  const float* up_bias;   // [cols]
  const float* residual;  // [rows][cols]; a y that is not narrow may be the residual
  int cols;
  int kind;
  int narrow;
  float limit;  // of a clamped gate, whose sigmoid takes alpha times it; 0: the gate is not clamped
  float alpha;

  INGOT_DEVICE void write(int64_t row, int col, float x) const { finish(row, col, first(col, x)); }
  INGOT_DEVICE void write_gated(int64_t row, int col, float x, float up) const {
    const float other = up_bias ? __fadd_rn(up, up_bias[col]) : up;
    finish(row, col, limit > 0.f ? clamped(bias ? __fadd_rn(x, bias[col]) : x, other) : first(col, x) * other);
  }

  // Four neighbours at once: the same bits. Loads come first, since y may be what they read.
  INGOT_DEVICE void load_biases(FourTerms& of, int col) const {
    if (bias) of.bias = load_four(bias + col);
    if (up_bias) of.up_bias = load_four(up_bias + col);
  }
  INGOT_DEVICE void load_values(FourTerms& of, int64_t row, int col, const float* x, const float* up) const {
    of.x = load_four(x);
    if (up) of.up = load_four(up);
    load_residual(of, row, col);
  }
  INGOT_DEVICE void load_residual(FourTerms& of, int64_t row, int col) const {
    if (residual) of.residual = load_four(residual + row * cols + col);
  }
  INGOT_DEVICE void write_four(int64_t row, int col, const FourTerms& of, bool gated) const {
    Four<float> values = bias ? add_four(of.x, of.bias) : of.x;
    const bool clamps = gated && limit > 0.f;
    if (!clamps) values = activate_four(values, kind);
    if (gated) {
      const Four<float> other = up_bias ? add_four(of.up, of.up_bias) : of.up;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values.at[i] = clamps ? clamped(values.at[i], other.at[i]) : values.at[i] * other.at[i];
      }
    }
    if (residual) values = add_four(values, of.residual);
    store_activations(y, row * cols + col, values, narrow);
  }

 private:
  INGOT_DEVICE float first(int col, float x) const { return activate(bias ? __fadd_rn(x, bias[col]) : x, kind); }
  INGOT_DEVICE float clamped(float x, float up) const {  // NaN stays NaN
    const float gate = x > limit ? limit : x;
    const float other = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.f + expf(-alpha * gate)) * (other + 1.f);
  }
  INGOT_DEVICE void finish(int64_t row, int col, float value) const {
    if (residual) value = __fadd_rn(value, residual[row * cols + col]);
    store_activation(y, row * cols + col, value, narrow);
  }
};
