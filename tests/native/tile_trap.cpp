// Tile instructions on a machine without them: each raises SIGILL, and the handler does what it would have done. All
// other instructions of a kernel for AMX run as they are, so what is tested is its machine code; the machine needs
// AVX-512 with BF16. Built in place of plugins/cpu/isa/tiles_here.cpp with INGOT_TILE_TRAP. A tile instruction takes a
// microsecond or two: nothing here can be timed.
//
// After Intel's Architecture Instruction Set Extensions Programming Reference (319433), chapters "LDTILECFG" to
// "TILEZERO". What the processor refuses there ends the process here too, with the reason.
#include <signal.h>
#include <sys/ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "isa/cpu_isa.h"

namespace ingot {
namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kColumns = kRowBytes / 4;

struct Tile {
  int rows = 0, row_bytes = 0;
  uint32_t at[kRows][kColumns];
};

struct Registers {
  std::atomic_flag taken;
  Tile tiles[kTiles];
};

// A handler must not allocate, which the first touch of a thread's own memory may do: that memory is one pointer, and
// the registers come from here between LDTILECFG and TILERELEASE.
Registers pool[256];
[[gnu::tls_model("initial-exec")]] thread_local Registers* own = nullptr;

struct sigaction before;

[[noreturn]] void refuse(const char* why) {
  const char* const parts[] = {"tile instruction refused: ", why, "\n"};
  for (const char* part : parts)
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  std::abort();
}

Tile& configured_tile(int index) {
  if (own == nullptr) refuse("tiles are not configured");
  if (index >= kTiles || own->tiles[index].rows == 0) refuse("this tile is not configured");
  return own->tiles[index];
}

void release() {
  if (own != nullptr) own->taken.clear();
  own = nullptr;
}

void load_config(const uint8_t* config) {
  if (config[0] == 0) return release();
  if (config[0] != 1) refuse("LDTILECFG: palette");
  if (config[1] != 0) refuse("LDTILECFG: start_row other than 0 is beyond this trap");
  for (int i = 2; i < 16; ++i)
    if (config[i] != 0) refuse("LDTILECFG: reserved bytes 2 to 15");
  for (int i = kTiles; i < 16; ++i)
    if (config[16 + 2 * i] != 0 || config[17 + 2 * i] != 0 || config[48 + i] != 0)
      refuse("LDTILECFG: more than 8 tiles");
  for (size_t i = 0; own == nullptr && i < std::size(pool); ++i)
    if (!pool[i].taken.test_and_set()) own = &pool[i];
  if (own == nullptr) refuse("more threads than the trap has registers for");
  for (int i = 0; i < kTiles; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * i, sizeof(row_bytes));
    const int rows = config[48 + i];
    if (row_bytes > kRowBytes || rows > kRows || (row_bytes == 0) != (rows == 0)) refuse("LDTILECFG: shape of a tile");
    own->tiles[i].rows = rows;
    own->tiles[i].row_bytes = row_bytes;
    std::memset(own->tiles[i].at, 0, sizeof(Tile::at));
  }
}

void load(Tile& tile, const uint8_t* base, int64_t stride) {
  std::memset(tile.at, 0, sizeof(tile.at));
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.at[row], base + row * stride, static_cast<size_t>(tile.row_bytes));
}

void store(const Tile& tile, uint8_t* base, int64_t stride) {
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(base + row * stride, tile.at[row], static_cast<size_t>(tile.row_bytes));
}

struct Factors {
  Tile& sums;
  const Tile& x;
  const Tile& weight;
};

Factors factors(int sums, int x, int weight) {
  if (sums == x || sums == weight || x == weight) refuse("TDP: one tile named twice");
  const Factors f{configured_tile(sums), configured_tile(x), configured_tile(weight)};
  if (f.sums.row_bytes % 4 != 0 || f.x.row_bytes % 4 != 0 || f.sums.rows != f.x.rows ||
      f.x.row_bytes / 4 != f.weight.rows || f.sums.row_bytes != f.weight.row_bytes)
    refuse("TDP: shapes of tiles do not fit");
  return f;
}

float bf16(uint32_t pair, int half) { return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xFFFF0000u); }

// Always to nearest even, denormal numbers as zero, no exceptions: whatever the thread's MXCSR says.
void dot_bf16(const Factors& f) {
  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x9FC0);
  asm volatile("" : : : "memory");
  for (int m = 0; m < f.sums.rows; ++m) {
    float even[kColumns] = {}, odd[kColumns] = {};
    for (int k = 0; k < f.x.row_bytes / 4; ++k)
      for (int n = 0; n < kColumns; ++n) {
        even[n] = std::fma(bf16(f.x.at[m][k], 0), bf16(f.weight.at[k][n], 0), even[n]);
        odd[n] = std::fma(bf16(f.x.at[m][k], 1), bf16(f.weight.at[k][n], 1), odd[n]);
      }
    for (int n = 0; n < f.sums.row_bytes / 4; ++n)
      f.sums.at[m][n] = std::bit_cast<uint32_t>(std::bit_cast<float>(f.sums.at[m][n]) + (even[n] + odd[n]));
  }
  asm volatile("" : : : "memory");
  _mm_setcsr(control);
}

template <typename X, typename Weight>
void dot_int8(const Factors& f) {
  for (int m = 0; m < f.sums.rows; ++m)
    for (int k = 0; k < f.x.row_bytes / 4; ++k)
      for (int byte = 0; byte < 4; ++byte) {
        const int32_t x = static_cast<X>(f.x.at[m][k] >> (8 * byte));
        for (int n = 0; n < f.sums.row_bytes / 4; ++n)
          f.sums.at[m][n] +=
              static_cast<uint32_t>(x * static_cast<int32_t>(static_cast<Weight>(f.weight.at[k][n] >> (8 * byte))));
      }
}

// A general register by its number in an instruction.
int64_t general(const ucontext_t& context, int number) {
  static constexpr int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[places[number]];
}

struct Operand {
  bool memory = false;
  int reg = 0, rm = 0;           // tiles, where not memory
  int64_t base = 0, index = 0;   // of memory: address without index, and index times scale
  const uint8_t* end = nullptr;  // of the instruction
};

// ModRM and what follows; r, x and b are the bits of the VEX prefix that extend register numbers.
Operand decode(const uint8_t* p, int r, int x, int b, const ucontext_t& context) {
  const int mod = *p >> 6, rm = *p & 7;
  Operand o{.memory = mod != 3, .reg = (*p >> 3 & 7) | r << 3, .rm = rm | b << 3};
  ++p;
  if (!o.memory) {
    o.end = p;
    return o;
  }
  bool far_only = false,
       after_end = false;  // a displacement of 32 bits instead of a base; relative to the next instruction
  if (rm == 4) {
    const int scale = *p >> 6, index = (*p >> 3 & 7) | x << 3, base = *p & 7;
    ++p;
    if (index != 4) o.index = general(context, index) << scale;
    far_only = mod == 0 && base == 5;
    if (!far_only) o.base = general(context, base | b << 3);
  } else {
    after_end = mod == 0 && rm == 5;
    if (!after_end) o.base = general(context, rm | b << 3);
  }
  if (mod == 1) {
    o.base += static_cast<int8_t>(*p++);
  } else if (mod == 2 || far_only || after_end) {
    int32_t displacement;
    std::memcpy(&displacement, p, sizeof(displacement));
    o.base += displacement;
    p += sizeof(displacement);
  }
  if (after_end) o.base += reinterpret_cast<int64_t>(p);
  o.end = p;
  return o;
}

// Does the instruction and returns the next, or null where it is none of tiles.
const uint8_t* execute(const uint8_t* p, const ucontext_t& context) {
  if (p[0] != 0xC4 || (p[1] & 0x1F) != 2 || (p[2] & 0x84) != 0) return nullptr;  // VEX.128.0F38.W0
  enum { kNone, k66, kF3, kF2 };
  const int prefix = p[2] & 3, third = ~(p[2] >> 3) & 15;
  const Operand o = decode(p + 4, ~p[1] >> 7 & 1, ~p[1] >> 6 & 1, ~p[1] >> 5 & 1, context);
  uint8_t* const at = reinterpret_cast<uint8_t*>(o.base);
  switch (p[3]) {
    case 0x49:
      if (prefix == kNone && o.memory && o.reg == 0)
        load_config(reinterpret_cast<uint8_t*>(o.base + o.index));
      else if (prefix == kNone && p[4] == 0xC0)
        release();  // TILERELEASE
      else if (prefix == kF2 && !o.memory && o.rm == 0)
        std::memset(configured_tile(o.reg).at, 0, sizeof(Tile::at));
      else
        return nullptr;
      return o.end;
    case 0x4B:
      if (!o.memory || (p[4] & 7) != 4) return nullptr;
      if (prefix == kF2 || prefix == k66)
        load(configured_tile(o.reg), at, o.index);
      else if (prefix == kF3)
        store(configured_tile(o.reg), at, o.index);
      else
        return nullptr;
      return o.end;
    case 0x5C:
      if (o.memory || prefix != kF3) return nullptr;
      dot_bf16(factors(o.reg, o.rm, third));
      return o.end;
    case 0x5E:
      if (o.memory) return nullptr;
      if (prefix == kF2) dot_int8<int8_t, int8_t>(factors(o.reg, o.rm, third));
      if (prefix == kF3) dot_int8<int8_t, uint8_t>(factors(o.reg, o.rm, third));
      if (prefix == k66) dot_int8<uint8_t, int8_t>(factors(o.reg, o.rm, third));
      if (prefix == kNone) dot_int8<uint8_t, uint8_t>(factors(o.reg, o.rm, third));
      return o.end;
  }
  return nullptr;
}

void trap(int, siginfo_t*, void* where) {
  ucontext_t& context = *static_cast<ucontext_t*>(where);
  greg_t& next = context.uc_mcontext.gregs[REG_RIP];
  const uint8_t* const end = execute(reinterpret_cast<const uint8_t*>(next), context);
  if (end != nullptr)
    next = reinterpret_cast<greg_t>(end);
  else
    sigaction(SIGILL, &before, nullptr);  // and the instruction again
}

}  // namespace

bool has_tiles() {
  static const bool trapped = [] {
    struct sigaction action = {};
    action.sa_sigaction = trap;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    return sigaction(SIGILL, &action, &before) == 0;
  }();
  return trapped;
}

}  // namespace ingot
