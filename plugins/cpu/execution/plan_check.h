// What a plan's fields must be by themselves and between them, whatever its steps: sizes, names and places. The bounds
// are those of src/ingot/plan.py and src/ingot/plan_check.py, so that Python and C++ take the same plans.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "execution/plan_spec.h"

namespace ingot {

constexpr int64_t kMaxCount = 1LL << 31;  // of rows, columns, positions: products of two fit int64
constexpr int64_t kStateWindow = 2;       // of a cache group with states, see CacheGroup in src/ingot/plan.py
constexpr int64_t kAlignment = 64;        // of buffers and pieces

// Bytes of a layer's keys and values in a block, of a block, and of all; see CacheGroup in src/ingot/plan.py.
struct CacheSizes {
  explicit CacheSizes(const CacheSpec& cache);  // throws std::invalid_argument
  int64_t itemsize, padded_dim = 0, k_block = 0, v_block = 0, block = 0, total;
  std::vector<int64_t> state_offsets;  // of a group with states: bytes before each layer's numbers in a slot
  // place: of a layer among those of its group
  int64_t offset(int64_t place, bool values) const {
    if (!state_offsets.empty()) return state_offsets[static_cast<size_t>(place)];
    return place * (k_block + v_block) + (values ? k_block : 0);
  }
};

// Where a layer's keys and values are: its group, and its place among the layers of that group.
struct LayerPlace {
  int64_t group, place;
};
// Throws std::invalid_argument where no group has the layer.
LayerPlace find_layer(const std::vector<CacheSpec>& caches, int64_t layer);

// Throws std::invalid_argument that names the buffer and what is wrong.
void check_plan(const PlanSpec& plan);

// Throws std::invalid_argument for a weight whose rows do not lie in the weights section; panels are checked by the
// step that multiplies with them.
void check_weight(const WeightSpec& weight, int64_t weight_bytes);

int64_t buffer_rows(const PlanSpec& plan, const BufferSpec& buffer);  // of the largest step

int64_t product(int64_t a, int64_t b, int64_t c = 1);  // of counts; throws where it exceeds int64
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace ingot
