#include "isa/cpu_isa.h"

#include <cpuid.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

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

bool has_bf16() { return all_bits(cpuid(7, 1).a, bits({5})); }      // AVX512_BF16
bool has_avx_vnni() { return all_bits(cpuid(7, 1).a, bits({4})); }  // AVX-VNNI: VPDPBUSD of 256 bits without AVX-512

bool made_by_amd() {
  constexpr uint32_t kAuth = 0x68747541;  // the first letters of AuthenticAMD
  return cpuid(0).b == kAuth;
}

uint32_t family() {
  const uint32_t a = cpuid(1).a, base = a >> 8 & 0xF;
  return base < 0xF ? base : base + (a >> 20 & 0xFF);
}

constexpr std::array kLevels{
    IsaLevel{"amx", "avx512bf16", has_tiles}, IsaLevel{"avx512bf16", "avx512", has_bf16},
    IsaLevel{"avx512", "avx2", has_avx512},   IsaLevel{"avxvnni", "avx2", has_avx_vnni},
    IsaLevel{"avx2", "", has_avx2},
};

const IsaLevel* find_level(std::string_view name) {
  const auto* const found = std::ranges::find(kLevels, name, &IsaLevel::name);
  return found == kLevels.end() ? nullptr : found;
}

// The level of the instructions that an emulated one needs.
std::string_view without_emulation(std::string_view level) {
  constexpr std::string_view kEmulated = "emu";
  if (!level.ends_with(kEmulated)) return level;
  const IsaLevel* const stem = find_level(level.substr(0, level.size() - kEmulated.size()));
  return stem == nullptr || stem->base.empty() ? level : "avx2";
}

}  // namespace

// AMD's CPUs with AVX-512 (Zen 4 on) read streams by themselves; asked ahead they read less.
const int64_t kAskAhead = made_by_amd() && has_avx512() ? int64_t{0} : ~int64_t{0};
constexpr uint32_t kZen5 = 0x1A;  // its family; Zen 4 has 0x19, Intel 6
const int64_t kAskAtWork = family() >= kZen5 ? kAskAhead : ~int64_t{0};
const int64_t kAskInOrder = family() < kZen5 ? kAskAhead : ~int64_t{0};
const int64_t kL1Bytes = [] {
  constexpr long kUsual = 32768;
  const long said = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return said > 0 ? said : kUsual;
}();
bool quick_multiply_32 = made_by_amd();
bool permutes_bytes = has_avx512() && all_bits(cpuid(7).c, bits({1}));

uint64_t saved_states() {
  if (!all_bits(cpuid(1).c, bits({27}))) return 0;  // OSXSAVE
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool has_pclmul() { return all_bits(cpuid(1).c, bits({1})); }

std::span<const IsaLevel> isa_levels() {
  static const auto levels = [] {
    auto preferred = kLevels;
    // AMD's CPUs do twice as many operations with the dot product of bf16 as with float32, Intel's half as many.
    if (!made_by_amd()) std::swap(preferred[1], preferred[2]);
    return preferred;
  }();
  return levels;
}

std::string_view detect_isa() {
  static const std::string_view best = [] {
    const auto levels = isa_levels();
    const auto found = std::ranges::find_if(levels, [](const IsaLevel& level) { return offers_isa(level.name); });
    return found == levels.end() ? "none" : found->name;
  }();
  return best;
}

bool offers_isa(std::string_view level) {
  const IsaLevel* const found = find_level(without_emulation(level));
  return found != nullptr && (found->base.empty() || offers_isa(found->base)) && found->here();
}

bool isa_includes(std::string_view isa, std::string_view wanted) {
  const IsaLevel* const target = find_level(without_emulation(wanted));
  const IsaLevel* level = find_level(without_emulation(isa));
  while (level != nullptr && level != target) level = find_level(level->base);
  return level != nullptr;
}

}  // namespace ingot
