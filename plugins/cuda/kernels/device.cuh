// What every kernel file shares: element types, conversions, reductions, and the few instructions written as PTX.
//
// nvcc compiles these files to machine code. Tests compile the same files with a C++ compiler: then emulated_device.h
// stands for threads, barriers, shuffles and PTX, and these lines are the only ones that differ.
//
// Compiled once per engine, with macros:
//   INGOT_WEIGHT    type of weights and of the inputs of matrix products: F32, BF16 or F16
//   INGOT_KV        type of the KV cache
//   INGOT_HEAD_DIM  dims of an attention head
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define INGOT_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define INGOT_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INGOT_DEVICE __device__ __forceinline__
#else
#include "emulated_device.h"
#endif

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct F32 {
  float value;
};
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

using Weight = INGOT_WEIGHT;
using Kv = INGOT_KV;
constexpr int kHeadDim = INGOT_HEAD_DIM;
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;

#ifdef __CUDACC__
INGOT_DEVICE float f16_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
INGOT_DEVICE uint16_t float_to_f16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
INGOT_DEVICE uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

INGOT_DEVICE float to_float(F32 x) { return x.value; }
INGOT_DEVICE float to_float(BF16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
INGOT_DEVICE float to_float(F16 x) { return f16_to_float(x.bits); }

template <class T>
INGOT_DEVICE T from_float(float x);
template <>
INGOT_DEVICE F32 from_float<F32>(float x) {
  return {x};
}
template <>
INGOT_DEVICE BF16 from_float<BF16>(float x) {
  return {float_to_bf16(x)};
}
template <>
INGOT_DEVICE F16 from_float<F16>(float x) {
  return {float_to_f16(x)};
}

// Two neighbours as the matrix units take them: the first in the low half.
template <class T>
INGOT_DEVICE uint32_t pack_two(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

// Activations lie as float32, or ("narrow") in the type that matrix products take.
INGOT_DEVICE void store_activation(void* data, int64_t index, float value, int narrow) {
  if (narrow) {
    static_cast<Weight*>(data)[index] = from_float<Weight>(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

INGOT_DEVICE float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Sum over the block; `scratch` holds one float per warp. Every thread gets the sum.
template <int kThreads>
INGOT_DEVICE float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.f;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += scratch[warp];
  __syncthreads();  // scratch may be used again
  return total;
}
