// CRC-32 as in zlib (polynomial 0x04C11DB7, reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

uint32_t crc32(uint32_t crc, const uint8_t* data, size_t bytes);

// Replaces a state and `bytes` (a multiple of 64, at least 64) of data by 16 bytes that advance a zero state to the
// same end. Needs PCLMULQDQ. A state is the complement of a CRC.
void crc32_fold_pclmul(uint32_t state, const uint8_t* data, size_t bytes, uint8_t folded[16]);

}  // namespace ingot
