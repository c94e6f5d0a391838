// Slots of recurrent states as kernels see them, and the stretches of a step's tokens between the slots where a state
// is left: CacheGroup of src/ingot/plan.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// One layer's part of slot 0, from which slot b's lies b * slot_bytes further on, and the batch that uses them.
struct StateSlots {
  std::byte* numbers;
  int64_t slot_bytes, block_size;
  int64_t group;                // of the plan's cache groups: the one that the layer is in
  const int32_t* block_tables;  // of the group, [sequences, table_width]; -1: the state is not kept there
  int64_t table_width;
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* past_lengths;  // [sequences]
  int64_t sequences, tokens;

  float* slot(int32_t number) const { return reinterpret_cast<float*>(numbers + number * slot_bytes); }

  // each(begin, end, before, after) for the stretches of a sequence's tokens in order: the state is taken from
  // `before`, null for a fresh one, and left in `after`, which may be the same.
  template <typename Each>
  [[gnu::always_inline]] void for_each_run(int64_t sequence, Each each) const {
    const int32_t* slots = block_tables + sequence * table_width;
    const int64_t first = query_starts[sequence], last = query_starts[sequence + 1], past = past_lengths[sequence];
    const float* before = past == 0 ? nullptr : slot(slots[(past - 1) / block_size]);
    for (int64_t begin = first; begin < last;) {
      int64_t place = (past + begin - first) / block_size;
      while (slots[place] < 0) ++place;  // the last place has a slot: Batch::check_blocks
      const int64_t full = first + (place + 1) * block_size - past, end = full < last ? full : last;
      float* after = slot(slots[place]);
      each(begin, end, before, after);
      begin = end;
      before = after;
    }
  }
};

}  // namespace ingot
