// The ranks that compute a model together, as sessions and kernels see them: where a rank leaves its part of a sum, how
// it waits for the others, and how the first rank hands each step to the rest. Sessions whose ranks exchange numbers in
// another way, on GPUs, take the steps from here, and find out here who is lost.
//
//     rank   2 ─────▶ 0     stage 0 passes rows on to stage 1, whose first rank leads: it has the logits
//            ║        ║     ranks of a stage meet in collectives
//            3 ─────▶ 1
//
// Ranks of a stage meet when a step begins, number 0, and in each collective of its plan, 1, 3, ..., or in two
// meetings, 1 and 2, 3 and 4, ...; steps that need no logits leave the last ones out. A rank that has passed a meeting
// knows that all others of its stage have read what came before it: slots.h says who takes which slot. Messages to the
// next stage take two places in turn: one step may be sent while the next stage still reads the one before.
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

  Meeting again() const { return {number + 1, slot, name}; }
};

// What a stage passes on to the next one: rows of a buffer.
struct Message {
  int64_t index;     // among those of a step
  size_t offset;     // where it lies in the messages of a step
  const char* name;  // of the plan's step, for errors
};

enum class NextStep { kBegun, kNone, kInterrupted };

class RankGroup {
 public:
  static constexpr int kMostRanks = 64, kSlots = 3;
  static constexpr int64_t kMostMeetings = 1 << 16;  // of a step
  static constexpr int kSteps = 2;                   // whose messages lie side by side
  // Steps whose batches lie side by side: of each stage that computes one, and of one that the first rank announces
  // meanwhile. Without stages the others may be some steps late, so that the first rank does not wait for them.
  static constexpr int batches_of(int stages) { return std::max(4, stages + 1); }

  // Throws std::invalid_argument for a number of ranks that stages do not divide.
  RankGroup(int rank, int count, int stages);
  virtual ~RankGroup() = default;

  int rank() const { return rank_; }
  int count() const { return count_; }
  int stages() const { return stages_; }
  int batches() const { return batches_of(stages_); }
  int stage() const { return stages_ - 1 - rank_ / places(); }
  // Of the ranks of this stage: how many there are, and which this one is.
  int places() const { return count_ / stages_; }
  int place() const { return rank_ % places(); }

  virtual size_t slot_bytes() const = 0;
  // Where this rank writes what it brings to a meeting, and where that of any rank of its stage is read after it.
  virtual std::byte* own(int slot) = 0;
  virtual const float* of(int slot, int place) const = 0;
  // The slot of the stage's first rank, where all of its ranks may write; null: they share no memory.
  virtual std::byte* common(int slot) = 0;

  // Every thread of a team, behind a barrier: returns when all ranks of the stage have written `bytes` of their slots.
  // False: the group has failed.
  virtual bool meet(const Team& team, const Meeting& meeting, size_t bytes) = 0;

  // Every thread of a team, behind a barrier: `n` numbers to the same place of the next stage, from the one before. The
  // team may go on when they return; false: the group has failed.
  virtual size_t message_bytes() const = 0;  // of a step
  virtual bool send(const Team& team, const Message& message, const float* x, int64_t n) = 0;
  virtual bool receive(const Team& team, const Message& message, float* y, int64_t n) = 0;
  // The rank computes: those who wait for it need not give up yet. From one thread, after each of its calls.
  virtual void beat() = 0;
  // How often each rank has done so. Empty: nobody knows.
  virtual std::vector<uint32_t> beats() const { return {}; }

  // The first rank: gives the others the batch of a step, which they begin as soon as they can; begins the oldest step
  // that it has not begun. Throw RankError.
  virtual void announce(std::span<const int32_t> batch) = 0;
  virtual void begin_step() = 0;
  // The others: waits for a step, as long as it takes, and fills `batch`. kNone: the first rank has closed its session.
  // `interrupted` is asked ten times a second. Throws RankError.
  virtual NextStep next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) = 0;

  // Bytes of every rank, at most slot_bytes() of each, in a step that has begun and runs no plan: they move to the
  // first rank, or from it. `alike` neighbours have the same bytes. The first rank has `parts`, one for each `alike`
  // ranks, and leaves its own alone; each other one has `own`. False: the group has failed.
  virtual bool gather(std::span<const std::byte> own, std::span<const std::span<std::byte>> parts, int alike) = 0;
  virtual bool scatter(std::span<std::byte> own, std::span<const std::span<const std::byte>> parts, int alike) = 0;

  // `meet` with `n` numbers of `x`, which are copied into the slot first; null: they are there.
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

 private:
  int rank_, count_, stages_;
};

inline RankGroup::RankGroup(int rank, int count, int stages) : rank_(rank), count_(count), stages_(stages) {
  if (count < 2 || count > kMostRanks || rank < 0 || rank >= count || stages < 1 || count % stages != 0)
    throw std::invalid_argument("a group has 2 to " + std::to_string(kMostRanks) +
                                " ranks, as many in each stage: got " + std::to_string(rank) + " of " +
                                std::to_string(count) + " in " + std::to_string(stages) + " stages");
}

}  // namespace ingot
