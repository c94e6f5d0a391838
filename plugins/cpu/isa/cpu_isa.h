// What this machine's CPU and operating system offer.
#pragma once

#include <cstdint>
#include <string_view>

namespace ingot {

// The best level ("amx", "avx512bf16", "avx512", "avx2") that CPU and operating system support, or "none".
std::string_view detect_isa();

// Whether a machine of level `isa` runs kernels of level `wanted`; "avx512emu", "avx512bf16emu" and
// "amxemu" are plain C++ that needs AVX2.
bool isa_includes(std::string_view isa, std::string_view wanted);

bool has_pclmul();  // PCLMULQDQ

bool has_tiles();  // AMX-TILE, AMX-INT8, AMX-BF16; asks the operating system for the registers

uint64_t saved_states();  // the register states that the operating system saves (XCR0)

}  // namespace ingot
