// The ranks that compute a model together, as sessions and kernels see them: where a rank leaves its part of a sum, how
// it waits for the others, and how the first rank hands each step to the rest.
//
// A step has one meeting when it begins, number 0, and one for each collective of its plan, 1, 2, ...; steps that need
// no logits leave the last ones out. Collectives take two slots in turn: a rank that has passed a meeting knows that
// all others have read what came before it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "ingot/kernel.h"

namespace ingot {

// A rank is gone, late or of another engine; in words.
struct RankError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Meeting {
  int64_t number;  // within the step
  int slot;
  const char* name;  // of the plan's step, for messages
};

enum class NextStep { kBegun, kNone, kInterrupted };

class RankGroup {
 public:
  static constexpr int kMostRanks = 64, kSlots = 2;

  virtual ~RankGroup() = default;

  virtual int rank() const = 0;
  virtual int count() const = 0;
  virtual size_t slot_bytes() const = 0;
  // Where this rank writes what it brings to a meeting, and where that of any rank is read after it.
  virtual std::byte* own(int slot) = 0;
  virtual const float* of(int slot, int rank) const = 0;

  // Every thread of a team, behind a barrier: returns when all ranks have written `bytes` of their slots. False: the
  // group has failed.
  virtual bool meet(const Team& team, const Meeting& meeting, size_t bytes) = 0;

  // The first rank: begins a step, and gives the others its batch. Throws RankError.
  virtual void begin_step(std::span<const int32_t> batch) = 0;
  // The others: waits for a step, as long as it takes, and fills `batch`. kNone: the first rank has closed its session.
  // `interrupted` is asked ten times a second. Throws RankError.
  virtual NextStep next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) = 0;

  // The same with `n` numbers of `x`, which are copied into the slot first; null: they are there.
  bool bring(const Team& team, const Meeting& meeting, const float* x, int64_t n, size_t bytes) {
    if (x != nullptr) {
      const Team::Range mine = team.share(n);
      std::copy(x + mine.begin, x + mine.end, reinterpret_cast<float*>(own(meeting.slot)) + mine.begin);
      team.barrier();
    }
    return meet(team, meeting, bytes);
  }

  virtual void close() = 0;                         // the first rank: no more steps
  virtual void fail(const std::string& words) = 0;  // tells all ranks; the first words count
  virtual bool failed() const = 0;
  virtual void require_all() = 0;  // throws RankError where the group has failed, or a rank is known to have ended
  virtual std::string failure() const = 0;
};

}  // namespace ingot
