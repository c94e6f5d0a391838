// Ranks that are processes of one machine share a window: memory without a name (memfd), which is gone with the last of
// them. In it each rank has a line with the number of the last meeting that it has come to, and its slots.
//
// Who waits polls some hundred times, then sleeps (futex). A rank holds a lock of the file on the byte of its number.
// The kernel gives it up when the process ends, however it ends: so the others find out.
#pragma once

#include <atomic>

#include "ranks/rank_group.h"

namespace ingot {

struct WindowShape {
  int count;            // of ranks
  int64_t slot_bytes;   // that a rank brings to a meeting, at most
  int64_t batch_words;  // int32 numbers of a step's batch, at most

  size_t slot_stride() const;
  size_t slots_begin() const;
  size_t bytes() const;  // of the file
};

class Window final : public RankGroup {
 public:
  // Maps a file of shape.bytes() zeros, which may be named /proc/PID/fd/NUMBER. timeout: seconds after which a rank
  // that has not come counts as lost. Throws std::invalid_argument, RankError.
  Window(const std::string& path, int rank, const WindowShape& shape, double timeout);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int rank() const override { return rank_; }
  int count() const override { return shape_.count; }
  size_t slot_bytes() const override { return static_cast<size_t>(shape_.slot_bytes); }
  std::byte* own(int slot) override { return at(slot, rank_); }
  const float* of(int slot, int rank) const override { return reinterpret_cast<const float*>(at(slot, rank)); }
  bool meet(const Team& team, const Meeting& meeting, size_t bytes) override;
  void begin_step(std::span<const int32_t> batch) override;
  NextStep next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) override;
  void close() override;
  void fail(const std::string& words) override;
  bool failed() const override;
  std::string failure() const override;
  void require_all() override;

 private:
  struct Line;
  struct Head;
  enum class Waited { kCame, kFailed, kInterrupted };

  std::byte* at(int slot, int rank) const;
  int32_t* batch() const;
  uint32_t number(int64_t meeting) const;
  void arrive(uint32_t number);
  // interrupted: of a wait without an end; null: of `timeout_`, after which the group fails.
  Waited wait_for(int rank, uint32_t number, const char* name, const std::function<bool()>* interrupted);
  bool wait_for_all(uint32_t number, const char* name);
  bool is_here(int rank) const;
  std::string place(const char* name) const;

  int rank_;
  WindowShape shape_;
  double timeout_;
  int file_ = -1;
  std::byte* memory_ = nullptr;
  Head* head_ = nullptr;
  int64_t step_ = 0;  // that runs, or ran last; the first is 1
};

}  // namespace ingot
