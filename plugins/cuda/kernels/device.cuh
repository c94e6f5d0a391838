// What every kernel file shares: element types, conversions, reductions, and the few instructions written as PTX.
//
// nvcc compiles these files to machine code. Tests compile the same files with a C++ compiler: then emulated_device.h
// stands for threads, barriers, shuffles and PTX, and these lines are the only ones that differ.
//
// Compiled once per engine, with macros: INGOT_WEIGHT is the type of weights and of the inputs of matrix products, F32,
// BF16 or F16; kv_cache.cuh has those of attention. Files that do not use a macro do not see it: tests compile each
// file once for all engines that agree in what it sees.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define INGOT_KERNEL(threads) INGOT_KERNEL_TO_SHARE(threads, 1)
// Of whose blocks a multiprocessor shall have registers for so many.
#define INGOT_KERNEL_TO_SHARE(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define INGOT_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INGOT_DEVICE __device__ __forceinline__
#else
#include "emulated_device.h"
#endif

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;

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
// One instruction each, with a relative error of about 2^-22. Numbers too small for a float's usual form become zero.
INGOT_DEVICE float fast_exp2(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}
// threadIdx.x and blockIdx.x, which no register shall hold.
INGOT_DEVICE unsigned thread_anew() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
INGOT_DEVICE unsigned block_anew() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}
// A value that the compiler would otherwise compute anew in each step of a loop.
INGOT_DEVICE void hold(int& value) { asm volatile("" : "+r"(value)); }
INGOT_DEVICE float fast_reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}
INGOT_DEVICE void store_words(void* to, uint32_t a, uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b) : "memory");
}
INGOT_DEVICE void store_words(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
#endif

// In a captured step a kernel may begin before the one before it has ended (programmatic dependent launch, sm_90 and
// newer): its blocks are there already when the last of that one end. So every kernel waits until all that was launched
// before it has ended and its results can be read; only weights may be read earlier. Kernels that leave most of a GPU
// free, and matmuls of few rows, say at their start that the next one may begin. Others do not: on an H200, blocks that
// come early take more from a large kernel than they gain.
INGOT_DEVICE void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INGOT_DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Two numbers of FP8 (E4M3): the nearest ones, ties to even, the largest in the place of what is larger. The first lies
// in the low byte.
#ifdef __CUDACC__
INGOT_DEVICE uint32_t pack_fp8(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif

INGOT_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

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
#ifdef __CUDACC__
template <>
INGOT_DEVICE uint32_t pack_two<BF16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
INGOT_DEVICE uint32_t pack_two<F16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif

// Activations lie as float32, or ("narrow") in the type that matrix products take.
INGOT_DEVICE void store_activation(void* data, int64_t index, float value, int narrow) {
  if (narrow) {
    static_cast<Weight*>(data)[index] = from_float<Weight>(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

// Four neighbours, which one access moves: 16 bytes, or 8 of a type of two bytes. Buffers and weights begin on 64
// bytes, so in rows of whole fours each of them lies on its own size.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

template <class T>
INGOT_DEVICE Four<T> load_four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}
// Stores convert. Their instructions are written out: of a struct nvcc makes four at times.
template <class T>
INGOT_DEVICE void store_four(T* to, const Four<float>& values) {
  if constexpr (sizeof(T) == 2) {
    store_words(to, pack_two<T>(values.at[0], values.at[1]), pack_two<T>(values.at[2], values.at[3]));
  } else {
    store_words(to, __float_as_uint(values.at[0]), __float_as_uint(values.at[1]), __float_as_uint(values.at[2]),
                __float_as_uint(values.at[3]));
  }
}
// Eight neighbours, which lie on 16 bytes.
template <class T>
INGOT_DEVICE void store_eight(T* to, const Four<float>& low, const Four<float>& high) {
  if constexpr (sizeof(T) == 2) {
    store_words(to, pack_two<T>(low.at[0], low.at[1]), pack_two<T>(low.at[2], low.at[3]),
                pack_two<T>(high.at[0], high.at[1]), pack_two<T>(high.at[2], high.at[3]));
  } else {
    store_four(to, low), store_four(to + 4, high);
  }
}
INGOT_DEVICE void store_activations(void* data, int64_t index, const Four<float>& values, int narrow) {
  if (narrow) {
    store_four(static_cast<Weight*>(data) + index, values);
  } else {
    store_four(static_cast<float*>(data) + index, values);
  }
}

struct alignas(8) TwoFloats {
  float first, second;
};

// Two neighbours, of which the first has an even index.
INGOT_DEVICE void store_two_activations(void* data, int64_t index, float first, float second, int narrow) {
  if constexpr (sizeof(Weight) == 2) {
    if (narrow) {
      *reinterpret_cast<uint32_t*>(static_cast<Weight*>(data) + index) = pack_two<Weight>(first, second);
      return;
    }
  }
  *reinterpret_cast<TwoFloats*>(static_cast<float*>(data) + index) = TwoFloats{first, second};
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

// The same for a block of any number of warps, with one barrier; `scratch` holds kWarp floats and is used once.
INGOT_DEVICE float block_sum_once(float value, float* scratch) {
  const int lane = threadIdx.x % kWarp;
  value = warp_sum(value);
  if (lane == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? scratch[lane] : 0.f);
}
