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
