// How fast this machine multiplies and adds on operands in L1, to compare kernels with. Random operands: tile units are
// slower on them than on zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

// What a loop reads over and over: numbers in [-1, 1), or random bytes.
struct PeakData {
  alignas(64) float numbers[4096];
  alignas(64) int8_t bytes[4 * 4096];
  alignas(64) uint16_t halves[2 * 4096];  // bf16
};

// One of `rounds` reads of the data does `operations`; what was summed up goes to `sums`, 64 KiB.
struct PeakLoop {
  const char* name;  // <int8, bf16 or f32>.<isa>
  int64_t operations;
  void (*run)(const PeakData& data, std::byte* sums, int64_t rounds);
};

extern const PeakLoop kPeakF32Avx2, kPeakInt8Avx2, kPeakInt8AvxVnni, kPeakF32Avx512, kPeakInt8Avx512, kPeakBf16Avx512,
    kPeakBf16Amx, kPeakInt8Amx;

// Operations per second (a multiply-add is two) of `threads` threads, the best of turns of about a
// millisecond during `seconds`. Throws std::invalid_argument for what this machine does not have.
double peak_flops(const std::string& name, int threads, double seconds);

}  // namespace ingot
