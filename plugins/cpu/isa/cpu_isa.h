// What this machine's CPU and operating system offer. Levels of instructions are a tree, not a line: each stands on one
// other, and a CPU may offer several branches.
//
//   avx2 ← avx512 ← avx512bf16 ← amx
//        ← avxvnni
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ingot {

struct IsaLevel {
  std::string_view name, base;  // base: the level that it stands on, "" for avx2
  bool (*here)();               // whether this CPU adds its instructions to those of the base
};

std::span<const IsaLevel> isa_levels();  // the preferred one first

// The preferred level that CPU and operating system support, or "none".
std::string_view detect_isa();

// Whether this machine runs kernels of a level. Emulated ones ("avx512emu") are plain C++ that needs AVX2.
bool offers_isa(std::string_view level);

// Whether kernels of level `wanted` may run in a session of level `isa`: those of the level, of what it stands on, and
// all emulated ones.
bool isa_includes(std::string_view isa, std::string_view wanted);

// Whether VPMULLD takes one operation, as VPDPBUSD does: on AMD's CPUs. On Intel's it takes two. Tests set both.
extern bool quick_multiply_32;

// Whether the CPU permutes bytes of two registers (AVX512_VBMI). Tests set both.
extern bool permutes_bytes;

bool has_pclmul();  // PCLMULQDQ

bool has_tiles();  // AMX-TILE, AMX-INT8, AMX-BF16; asks the operating system for the registers

uint64_t saved_states();  // the register states that the operating system saves (XCR0)

}  // namespace ingot
