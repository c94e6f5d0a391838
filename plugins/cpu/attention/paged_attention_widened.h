// A tile of the cache whose codes became bf16, for passes of rows that read it one after the other.
#pragma once

#include <cstdint>

#include "attention/kv_layout.h"
#include "isa/pair_lines.h"

namespace ingot {
namespace {

static_assert(kPairLine == 2 * kKvLanes);

// Neighbouring lines that are read together.
template <typename T>
constexpr int kLinesAtOnce = kScaled<T> ? 2 : 1;

// Lines of a tile: of each 16 tokens, pairs of dims of keys and pairs of tokens of values, as kv_layout.h has them.
// next_dims: elements between 16 dims of values and the next 16.
template <typename L>
struct TileLines {
  const L* const* keys;
  const L* const* values;
  int64_t next_dims;
};

// Memory [2][kGroups][dims][16 tokens] for keys and values. S: widens two lines at a time, exactly.
template <typename S, int kGroups>
class WidenedTile {
 public:
  static int64_t floats(int64_t dims) { return kGroups * kGroupFloats * dims; }
  void allocate(float* memory, int64_t dims) {
    for (int g = 0; g < kGroups; ++g) {
      own_keys_[g] = reinterpret_cast<uint16_t*>(memory + g * kGroupFloats * dims);
      own_values_[g] = own_keys_[g] + kKvLanes * dims;
    }
  }
  [[nodiscard]] TileLines<uint16_t> lines() const { return {keys_, values_, kKvLanes * kKvLanes}; }

  // Asks for the lines of `next` meanwhile. head_dim: of keys, a multiple of four; padded_dim: of values.
  template <typename T, typename Fetch>
  [[gnu::noinline]] void widen(const TileLines<T>& tile, const TileLines<T>& next, int64_t head_dim, int64_t padded_dim,
                               Fetch fetch) {
    for (int g = 0; g < kGroups; ++g) {
      if (g > 0 && tile.keys[g] == tile.keys[g - 1]) {  // groups that nobody sees repeat another one
        keys_[g] = keys_[g - 1], values_[g] = values_[g - 1];
        continue;
      }
      keys_[g] = own_keys_[g], values_[g] = own_values_[g];
      two_lines(own_keys_[g], tile.keys[g], next.keys[g], head_dim / kDims, fetch);
    }
    for (int g = 0; g < kGroups; ++g) {
      if (values_[g] != own_values_[g]) continue;
      for (int64_t d = 0; d < padded_dim; d += kKvLanes) {
        const int64_t from = d / kKvLanes * tile.next_dims;
        two_lines(own_values_[g] + d * kKvLanes, tile.values[g] + from, next.values[g] + from, kKvLanes / kDims, fetch);
      }
    }
  }

 private:
  static constexpr int64_t kGroupFloats = kKvLanes;  // of a dim: its keys and values, half as long as a float
  static constexpr int64_t kDims = 4;                // or tokens, whose codes two lines hold

  template <typename T, typename Fetch>
  [[gnu::always_inline]] static inline void two_lines(uint16_t* to, const T* from, const T* next, int64_t count,
                                                      Fetch fetch) {
    for (int64_t i = 0; i < count; ++i, from += kDims * kKvLanes, next += kDims * kKvLanes) {
      typename S::V wide[2];
      load_lines<S, 1>(wide, from);
      for (const auto& line : wide) {
        S::store(reinterpret_cast<float*>(to), line);
        to += 2 * kKvLanes;
      }
      fetch(next);
    }
  }

  uint16_t *own_keys_[kGroups], *own_values_[kGroups];
  const uint16_t *keys_[kGroups], *values_[kGroups];
};

}  // namespace
}  // namespace ingot
