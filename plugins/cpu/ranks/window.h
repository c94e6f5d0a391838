// Ranks that are processes of one machine share a window: memory without a name (memfd), which is gone with the last of
// them. In it each rank has a line with the number of the last meeting that it has come to, and its slots.
//
// Who waits polls for 25 to 50 us, then sleeps (futex). A rank holds a lock of the file on the byte of its number.
// The kernel gives it up when the process ends, however it ends: so the others find out.
#pragma once

#include <array>
#include <atomic>

#include "ranks/rank_group.h"

namespace ingot {

struct WindowShape {
  int count;            // of ranks
  int64_t slot_bytes;   // that a rank brings to a meeting, at most
  int64_t batch_words;  // int32 numbers of a step's batch, at most
  int stages = 1;
  int64_t message_bytes = 0;  // that a rank passes on in a step, at most

  size_t batch_stride() const;
  size_t batches_begin() const;
  size_t slot_stride() const;
  size_t slots_begin() const;
  size_t messages_stride() const;
  size_t messages_begin() const;
  size_t bytes() const;  // of the file
};

class Window final : public RankGroup {
 public:
  // Maps a file of shape.bytes() zeros, which may be named /proc/PID/fd/NUMBER. timeout: seconds after which a rank
  // that has not come, and neither computes nor waits for others, counts as lost. Throws std::invalid_argument,
  // RankError.
  Window(const std::string& path, int rank, const WindowShape& shape, double timeout);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  size_t slot_bytes() const override { return static_cast<size_t>(shape_.slot_bytes); }
  std::byte* own(int slot) override { return at(slot, rank()); }
  const float* of(int slot, int place) const override {
    return reinterpret_cast<const float*>(at(slot, rank() - this->place() + place));
  }
  std::byte* common(int slot) override { return at(slot, rank() - place()); }
  bool meet(const Team& team, const Meeting& meeting, size_t bytes) override;
  size_t message_bytes() const override { return static_cast<size_t>(shape_.message_bytes); }
  bool send(const Team& team, const Message& message, const float* x, int64_t n) override;
  bool receive(const Team& team, const Message& message, float* y, int64_t n) override;
  void beat() override;
  std::vector<uint32_t> beats() const override;
  void announce(std::span<const int32_t> batch) override;
  void begin_step() override;
  NextStep next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) override;
  bool gather(std::span<const std::byte> own, std::span<const std::span<std::byte>> parts, int alike) override;
  bool scatter(std::span<std::byte> own, std::span<const std::span<const std::byte>> parts, int alike) override;
  void close() override;
  void fail(const std::string& words) override;
  bool failed() const override;
  std::string failure() const override;
  void require_all() override;

 private:
  struct Word;
  struct Line;
  struct Head;
  enum class Waited { kCame, kFailed, kInterrupted };
  enum class Patience { kTimeout, kForEver };

  std::byte* at(int slot, int rank) const;
  std::byte* messages_of(int rank) const;  // in this step
  int32_t* batch(int64_t step) const;
  uint32_t number(int64_t meeting) const;
  void store(Word& word, uint32_t number);
  // Until a word of `rank` has come to a number. kTimeout: the group fails `timeout_` after that rank last computed, or
  // looked for others itself: so who fails it names the rank that stands still, not one that waits for that rank as
  // well. kForEver: until `interrupted`.
  Waited wait_for(Word& word, int rank, uint32_t number, const char* name, Patience patience,
                  const std::function<bool()>* interrupted = nullptr);
  bool meet_all(uint32_t number, const char* name);
  bool is_here(int rank) const;
  std::string where(const char* name) const;

  WindowShape shape_;
  double timeout_;
  int file_ = -1;
  std::byte* memory_ = nullptr;
  Head* head_ = nullptr;
  int64_t step_ = 0;                     // that runs, or ran last; the first is 1
  int64_t announced_ = 0;                // of the first rank: the last step that the others know
  std::array<uint32_t, kSteps> sent_{};  // the last message of the step whose messages lay there
};

}  // namespace ingot
