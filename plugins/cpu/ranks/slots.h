// Which slots the collectives of a plan take.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>

#include "ranks/rank_group.h"

namespace ingot {

// Ranks write their parts into a slot as soon as they have passed the collective before. By then all ranks must have
// read what the slot held: parts in their own collective, sums that were left in the slot in later steps.
class Slots {
 public:
  // For the next collective. before: the plan's step of the collective before; last_read: the last step that reads what
  // the slot will hold, which must be ahead of the second collective from this one.
  int take(std::optional<size_t> before, size_t last_read) {
    for (size_t slot = 0; slot < last_reads_.size(); ++slot) {
      std::optional<size_t>& held = last_reads_[slot];
      if (held && *held >= before) continue;
      held = last_read;
      return static_cast<int>(slot);
    }
    throw std::logic_error("what a slot holds is read behind the second collective from its own");
  }

 private:
  std::array<std::optional<size_t>, RankGroup::kSlots> last_reads_;
};

}  // namespace ingot
