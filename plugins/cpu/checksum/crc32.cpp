#include "checksum/crc32.h"

#include <array>

#include "isa/cpu_isa.h"

namespace ingot {
namespace {

// kTables[0] advances the state by one byte; kTables[i] by that byte and i zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? 0xEDB88320u : 0);
    tables[0][byte] = state;
  }
  for (size_t i = 1; i < 8; ++i)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[i][byte] = (tables[i - 1][byte] >> 8) ^ tables[0][tables[i - 1][byte] & 0xFF];
  return tables;
}();

uint32_t table_state(uint32_t state, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint32_t next = 0;
    for (int i = 0; i < 4; ++i) next ^= kTables[7 - i][(data[i] ^ (state >> (8 * i))) & 0xFF];
    for (int i = 4; i < 8; ++i) next ^= kTables[7 - i][data[i]];
    state = next;
  }
  for (; bytes > 0; ++data, --bytes) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
  return state;
}

}  // namespace

uint32_t crc32(uint32_t crc, const uint8_t* data, size_t bytes) {
  uint32_t state = ~crc;
  static const bool folding = has_pclmul();
  if (folding && bytes >= 64) {
    uint8_t folded[16];
    const size_t whole = bytes & ~size_t{63};
    crc32_fold_pclmul(state, data, whole, folded);
    state = table_state(0, folded, sizeof(folded));
    data += whole;
    bytes -= whole;
  }
  return ~table_state(state, data, bytes);
}

}  // namespace ingot
