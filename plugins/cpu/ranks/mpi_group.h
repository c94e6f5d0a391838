// Ranks of several machines meet by MPI: each gathers the parts of all and adds them up itself, in the order of the
// ranks, since MPI's own sums have no fixed order.
//
// This module links no MPI. Python hands over the addresses of functions of the one that mpi4py has loaded, and its
// handles, which are integers or pointers: either fits a word of the calling convention.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "execution/memory.h"
#include "ranks/rank_group.h"

namespace ingot {

struct MpiCalls {
  uintptr_t iallgather, ibcast, isend, irecv, test;  // MPI_Iallgather, MPI_Ibcast, MPI_Isend, MPI_Irecv, MPI_Test
  uintptr_t comm, stage_comm, byte;                  // communicators of all ranks and of those of this stage, MPI_BYTE
};

class MpiGroup final : public RankGroup {
 public:
  // timeout: seconds that a rank may be late. message_bytes: as of WindowShape. Throws std::invalid_argument,
  // std::bad_alloc.
  MpiGroup(const MpiCalls& calls, int rank, int count, int64_t slot_bytes, double timeout, int stages,
           int64_t message_bytes);

  size_t slot_bytes() const override { return slot_bytes_; }
  std::byte* own(int slot) override { return own_.data() + static_cast<size_t>(slot) * slot_bytes_; }
  const float* of(int slot, int place) const override;
  std::byte* common(int) override { return nullptr; }
  bool meet(const Team& team, const Meeting& meeting, size_t bytes) override;
  size_t message_bytes() const override { return message_bytes_; }
  bool send(const Team& team, const Message& message, const float* x, int64_t n) override;
  bool receive(const Team& team, const Message& message, float* y, int64_t n) override;
  void beat() override {}
  void announce(std::span<const int32_t> batch) override;
  void begin_step() override;
  NextStep next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) override;
  bool gather(std::span<const std::byte> own, std::span<const std::span<std::byte>> parts, int alike) override;
  bool scatter(std::span<std::byte> own, std::span<const std::span<const std::byte>> parts, int alike) override;
  void close() override;
  void fail(const std::string& words) override;
  bool failed() const override { return failed_.load(std::memory_order_acquire); }
  std::string failure() const override;
  void require_all() override;  // MPI ends all processes when one has ended

 private:
  using Request = uintptr_t;

  // A batch that is on its way to the other ranks.
  struct Announced {
    int64_t size = 0;
    std::vector<int32_t> batch;
    std::array<Request, 2> requests{};  // of both
    bool under_way = false;
  };

  void broadcast(void* data, size_t bytes, uintptr_t& request) const;
  // To another rank, and from one, message `tag`; false, and the group has failed: MPI says an error.
  bool isend(std::span<const std::byte> bytes, int to, int tag, Request& request);
  bool irecv(std::span<std::byte> bytes, int from, int tag, Request& request);
  bool wait_for(Announced& announced);
  bool done(uintptr_t& request) const;
  // False, and the group has failed: the others have not come in time.
  bool wait(uintptr_t& request, const char* name);

  MpiCalls calls_;
  size_t slot_bytes_, message_bytes_;
  double timeout_;
  Region messages_;                                // [kSteps]: what goes to the next stage
  std::array<std::vector<Request>, kSteps> sent_;  // by message, while they are under way
  std::vector<Announced> announced_;               // of the first rank, [batches()]
  int64_t announced_steps_ = 0;
  Region own_, all_;                      // [slots], [slots][ranks]: what this rank brings, and what all have brought
  std::array<size_t, kSlots> brought_{};  // bytes of each rank in the last meeting of a slot
  int64_t batch_size_ = 0;
  uintptr_t next_ = 0;  // request for the size of the next batch, where it is under way
  bool waits_for_next_ = false;
  int64_t step_ = 0;
  std::atomic<bool> failed_{false};
  mutable std::mutex words_lock_;
  std::string words_;
};

}  // namespace ingot
