#include "isa/cpu_isa.h"

#include <cpuid.h>

#include <cstdint>

#include "isa/prefetch.h"

namespace ingot {
namespace {

struct CpuidRegisters {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool all_bits(uint64_t value, uint64_t wanted) { return (value & wanted) == wanted; }

constexpr uint32_t bits(std::initializer_list<int> positions) {
  uint32_t value = 0;
  for (int position : positions) value |= 1u << position;
  return value;
}

bool has_avx2() {
  const uint32_t leaf1_c =
      bits({0, 1, 9, 12, 19, 20, 22, 23, 28, 29});  // SSE3 PCLMUL SSSE3 FMA SSE4 MOVBE POPCNT AVX F16C
  return all_bits(saved_states(), 0x6) && all_bits(cpuid(1).c, leaf1_c) && all_bits(cpuid(7).b, bits({3, 5, 8}));
}

bool has_avx512() {
  return all_bits(saved_states(), 0xE6) && all_bits(cpuid(7).b, bits({16, 17, 30, 31})) &&  // F DQ BW VL
         all_bits(cpuid(7).c, bits({11}));                                                  // VNNI
}

bool has_bf16() { return all_bits(cpuid(7, 1).a, bits({5})); }  // AVX512_BF16

}  // namespace

// AMD's CPUs with AVX-512 (Zen 4 on) read streams by themselves; asked ahead they read less.
const int64_t kAskAhead = [] {
  constexpr uint32_t kAuth = 0x68747541;  // the first letters of AuthenticAMD
  return cpuid(0).b == kAuth && has_avx512() ? int64_t{0} : ~int64_t{0};
}();

uint64_t saved_states() {
  if (!all_bits(cpuid(1).c, bits({27}))) return 0;  // OSXSAVE
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool has_pclmul() { return all_bits(cpuid(1).c, bits({1})); }

std::string_view detect_isa() {
  static const std::string_view best = [] {
    if (!has_avx2()) return "none";
    if (!has_avx512()) return "avx2";
    if (!has_bf16()) return "avx512";
    return has_tiles() ? "amx" : "avx512bf16";
  }();
  return best;
}

bool isa_includes(std::string_view isa, std::string_view wanted) {
  const auto rank = [](std::string_view level) {
    if (level == "amx") return 4;
    if (level == "avx512bf16") return 3;
    if (level == "avx512") return 2;
    if (level == "avx2" || level == "avx512emu" || level == "avx512bf16emu" || level == "amxemu") return 1;
    return level == "none" ? 0 : 5;
  };
  return rank(wanted) >= 1 && rank(wanted) <= rank(isa) && rank(isa) <= 4;
}

}  // namespace ingot
