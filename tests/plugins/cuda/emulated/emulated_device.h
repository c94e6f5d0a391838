// What kernels see instead of CUDA when a C++ compiler builds them: each thread of a block is a fiber, and barriers,
// shuffles, matrix instructions and asynchronous copies are calls of the scheduler in emulated_device.cpp.
//
// It is stricter than a GPU: a barrier that not every thread reaches, a shuffle that not every lane joins, a misaligned
// wide access and a missing wait for a copy are errors. Shared memory starts as NaN; threads run in either order, with
// copies as late or as early as they may happen.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "access_check.h"

#define INGOT_KERNEL(threads) extern "C" void
#define INGOT_KERNEL_TO_SHARE(threads, blocks) extern "C" void
#define INGOT_SHARED(name) unsigned char* name = emulated::shared_memory()
#define INGOT_DEVICE inline
#define __shared__ static
#define threadIdx emulated::thread_index()
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size
#define blockDim emulated::block_size

namespace emulated {

struct Index {
  unsigned x, y, z;
};
extern Index block_index, block_size, grid_size;

Index thread_index();
unsigned char* shared_memory();
size_t shared_bytes();
bool runs_backwards();  // the last thread first, and what is asynchronous at once
void barrier();

// Every lane of the warp gives `count` words and gets all lanes' words: [32][count]. name: which instruction this is.
const uint32_t* exchange(const char* name, const uint32_t* words, int count);

bool is_own(uintptr_t address, size_t bytes);  // of the thread that runs: its stack, or words that a warp exchanges

void queue_copy(void* to, const void* from, bool valid, size_t bytes = 16);
void commit_copies();
void wait_copies(int pending);

[[noreturn]] void fail(const char* what);

}  // namespace emulated

inline void __syncthreads() { emulated::barrier(); }
inline void __syncwarp() { emulated::exchange("syncwarp", nullptr, 0); }

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) == 4);
  if (mask != 0xffffffffu) emulated::fail("a shuffle of a part of the warp");
  uint32_t word;
  std::memcpy(&word, &value, 4);
  word = emulated::exchange("shuffle", &word, 1)[lane % 32];
  std::memcpy(&value, &word, 4);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, (emulated::thread_index().x % 32) ^ static_cast<unsigned>(step));
}

inline bool __any_sync(unsigned mask, bool said) {
  if (mask != 0xffffffffu) emulated::fail("a vote of a part of the warp");
  const uint32_t word = said;
  const uint32_t* every = emulated::exchange("vote", &word, 1);
  for (int lane = 0; lane < 32; ++lane) {
    if (every[lane]) return true;
  }
  return false;
}

inline uint32_t __ballot_sync(unsigned mask, bool says) {
  if (mask != 0xffffffffu) emulated::fail("a vote of a part of the warp");
  const uint32_t word = says;
  const uint32_t* every = emulated::exchange("vote", &word, 1);
  uint32_t found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found |= every[lane] << lane;
  return found;
}
inline int __popc(uint32_t word) { return __builtin_popcount(word); }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
// Atomic operations give what was there before.
template <class F>
__attribute__((no_sanitize("thread"), noinline)) uint32_t change_word(uint32_t* at, F change) {
  emulated::check_access(at, sizeof *at, emulated::Access::kAtomic);
  const uint32_t before = *at;
  *at = change(before);
  return before;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) {
  return change_word(to, [value](uint32_t word) { return word + value; });
}
inline uint32_t atomicOr(uint32_t* to, uint32_t value) {
  return change_word(to, [value](uint32_t word) { return word | value; });
}
inline uint32_t atomicExch(uint32_t* to, uint32_t value) {
  return change_word(to, [value](uint32_t) { return value; });
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline void sincospif(float x, float* sine, float* cosine) {
  const double angle = x * 3.14159265358979323846;
  *sine = static_cast<float>(std::sin(angle)), *cosine = static_cast<float>(std::cos(angle));
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
using std::rint;
inline unsigned thread_anew() { return emulated::thread_index().x; }
inline unsigned block_anew() { return blockIdx.x; }
inline void hold(int&) {}
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.f / x; }

inline float f16_to_float(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t float_to_f16(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// FP8 (E4M3) has no infinities; what is larger than its largest number becomes that.
inline float fp8_to_float(uint32_t byte) {
  const uint32_t exponent = byte >> 3 & 15, fraction = byte & 7;
  if ((byte & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(1.f * fraction, -9);
  return byte & 128 ? -size : size;
}
inline uint32_t float_to_fp8(float value) {
  const uint32_t sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return 127;
  const float size = std::fmin(std::fabs(value), 448.f);
  int exponent = -6;
  if (size >= std::ldexp(1.f, -6)) exponent = std::ilogb(size);
  const uint32_t eighths = static_cast<uint32_t>(std::rint(std::ldexp(size, 3 - exponent)));  // 16: the next exponent
  return sign | (static_cast<uint32_t>(exponent + 6) * 8 + eighths);
}
inline uint32_t pack_fp8(float low, float high) { return float_to_fp8(low) | float_to_fp8(high) << 8; }

// Written as one access, on its own size.
template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t at[kCount];
};
inline void store_words(void* to, uint32_t a, uint32_t b) { *static_cast<Words<2>*>(to) = {{a, b}}; }
inline void store_words(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  *static_cast<Words<4>*>(to) = {{a, b, c, d}};
}

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
inline uint32_t bytes_at(uint32_t x, uint32_t y, uint32_t places) {
  for (int i = 0; i < 4; ++i) {
    if (places >> 4 * i & 8) return 0xdeadbeef;  // prmt would repeat a sign
  }
  return __byte_perm(x, y, places);
}
inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t more) { return (x & mask) | more; }
inline uint32_t fused_bf16(uint32_t x, uint32_t y, uint32_t z) {
  const auto half = [](uint32_t word, int high) { return __uint_as_float(high ? word & 0xffff0000u : word << 16); };
  uint32_t found = 0;
  for (int high = 0; high < 2; ++high) {
    const double exact = static_cast<double>(half(x, high)) * half(y, high) + half(z, high);
    found |= static_cast<uint32_t>(float_to_bf16(static_cast<float>(exact))) << 16 * high;
  }
  return found;
}

inline void copy_async(void* to, const void* from, bool valid) { emulated::queue_copy(to, from, valid); }
inline void copy_word_async(void* to, const void* from, bool valid) { emulated::queue_copy(to, from, valid, 4); }
inline void copy_commit() { emulated::commit_copies(); }
template <int kPending>
void copy_wait() {
  emulated::wait_copies(kPending);
}

inline uint32_t two_halves(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// Lane 8 * m + r gives the address of row r of matrix m.
inline void gather_matrices(uint32_t (&to)[4], const void* row, bool transposed) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (address % 16) emulated::fail("ldmatrix of a row that does not lie on 16 bytes");
  const uint32_t words[2] = {static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)};
  const uint32_t* every = emulated::exchange(transposed ? "ldmatrix.trans" : "ldmatrix", words, 2);
  const unsigned lane = emulated::thread_index().x % 32;
  const auto element = [&](unsigned matrix, unsigned row_number, unsigned column) {
    const uint32_t* given = every + 2 * (8 * matrix + row_number);
    return reinterpret_cast<const uint16_t*>(given[0] | static_cast<uintptr_t>(given[1]) << 32)[column];
  };
  for (unsigned m = 0; m < 4; ++m) {
    const unsigned long_way = lane / 4, pair = 2 * (lane % 4);
    to[m] = transposed ? two_halves(element(m, pair, long_way), element(m, pair + 1, long_way))
                       : two_halves(element(m, long_way, pair), element(m, long_way, pair + 1));
  }
}
inline void load_matrices(uint32_t (&to)[4], const void* row) { gather_matrices(to, row, false); }
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) { gather_matrices(to, row, true); }

template <class T>
float half_to_float(uint32_t word, unsigned high);

// mma.m16n8k16: a holds rows lane/4 and lane/4 + 8, columns 2 * (lane%4), + 8; b rows 2 * (lane%4), + 8, column lane/4.
template <class T>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t* every = emulated::exchange("mma", words, 6);
  const unsigned lane = emulated::thread_index().x % 32;
  for (unsigned c = 0; c < 4; ++c) {
    const unsigned row = lane / 4 + (c >= 2 ? 8 : 0), column = 2 * (lane % 4) + c % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned holder = k % 8 / 2;
      const uint32_t left = every[6 * (row % 8 * 4 + holder) + (row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)];
      const uint32_t right = every[6 * (column * 4 + holder) + 4 + (k >= 8 ? 1 : 0)];
      sum[c] += half_to_float<T>(left, k % 2) * half_to_float<T>(right, k % 2);
    }
  }
}

// mma.m16n8k32 of FP8: likewise, a word has four neighbouring k.
inline void multiply_add_fp8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t* every = emulated::exchange("mma of FP8", words, 6);
  const unsigned lane = emulated::thread_index().x % 32;
  for (unsigned c = 0; c < 4; ++c) {
    const unsigned row = lane / 4 + (c >= 2 ? 8 : 0), column = 2 * (lane % 4) + c % 2;
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned holder = k % 16 / 4, upper = k / 16;
      const uint32_t left = every[6 * (row % 8 * 4 + holder) + (row >= 8 ? 1 : 0) + 2 * upper];
      const uint32_t right = every[6 * (column * 4 + holder) + 4 + upper];
      sum[c] += fp8_to_float(left >> 8 * (k % 4) & 255) * fp8_to_float(right >> 8 * (k % 4) & 255);
    }
  }
}
inline void multiply_fp8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  for (float& each : sum) each = 0.f;
  multiply_add_fp8(sum, a, b0, b1);
}
