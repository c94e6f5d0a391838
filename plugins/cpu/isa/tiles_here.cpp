// In tests, tests/native/tile_trap.cpp takes the place of this file (INGOT_TILE_TRAP).
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "isa/cpu_isa.h"

namespace ingot {

// Linux gives tile registers to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool has_tiles() {
  const uint32_t tile_bits = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16 AMX-TILE AMX-INT8
  uint32_t a, b, c, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile_bits) != tile_bits) return false;
  const uint64_t tile_states = 0x60000;
  return (saved_states() & tile_states) == tile_states && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

}  // namespace ingot
