// The one thread pool of the process. Workers are pinned, spin for some 40 us between steps, then sleep.
//
// tests/native/interleavings.cpp compiles threads.cpp over atomics of its own and runs small teams through every order
// of their accesses. What is changed here has to pass there.
//
// At a barrier, threads meet in groups of kGroup neighbours, and the last of each group meets those of the others: of
// 64 threads never more than 8 write to one cache line, or wait for one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "ingot/kernel.h"
#include "threads/refusing_mutex.h"

namespace ingot {

// Waits until `word` differs from `old`: spins first, then sleeps in the kernel.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void wait(uint32_t old);
  void advance();  // to the next value, and wakes who sleeps

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<int32_t> sleepers_{0};
};

struct Cpu {
  int number, node;
};

// The system starts no more threads.
struct ThreadStartError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class PinnedCaller;

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256, kGroup = Team::kGroup;

  using Job = void (*)(void* context, const Team& team);

  // Made at first use, and anew in a forked child, which has none of its parent's threads.
  static ThreadPool& instance();

  // Starts what a team of `count` lacks. Throws ThreadStartError; the threads that there are stay of use.
  void start(int count);

  // Calls job on `count` threads at once, the caller being thread 0, and returns when all have finished.
  // Callers take turns. The job must not throw. Throws ThreadStartError before any thread is called.
  void run(int count, Job job, void* context);

  // Throws std::invalid_argument where the calling thread is in the middle of a run.
  void require_outside() const { turn_.refuse_holder(); }

  // For thread 0 in the middle of a run: asks while the thread has the CPUs that were its own before the run, since
  // threads and processes that it starts meanwhile inherit them.
  bool ask_unpinned(const std::function<bool()>& question);

  void barrier(int index, int count);
  double barrier_seconds(int count);  // of one among many in a row
  int64_t next_item() { return next_item_.fetch_add(1, std::memory_order_relaxed); }
  int64_t items_taken() const { return next_item_.load(std::memory_order_relaxed); }
  int64_t next_of_group(int index) { return groups_[index / kGroup].next_item.fetch_add(1, std::memory_order_relaxed); }
  int64_t next_of_shares(const Team::Range& owners, int index, int64_t number, int64_t items);
  int64_t barriers() const { return barriers_; }  // so far; for the threads of a run
  std::byte* scratch(int thread, size_t bytes) { return grown(scratch_[thread], bytes); }
  std::byte* rows_scratch(int thread, size_t bytes) { return grown(rows_scratch_[thread], bytes); }

  // One of each core of this process (affinity, SMT and quota counted). Thread i runs on number i, and beyond them all
  // from the first again; neighbours share a node.
  const std::vector<Cpu>& cpus() const { return cpus_; }

 private:
  struct Worker;
  struct Group {
    alignas(64) std::atomic<int32_t> arrived{0};
    Signal passed;  // advances when all threads of all groups have arrived
    alignas(64) std::atomic<int64_t> next_item{0};
  };
  // How many items of a thread's share are taken, below the number of the round in which they were.
  struct alignas(64) Share {
    static constexpr int kBits = 24;
    std::atomic<uint64_t> taken{0};
  };
  struct Scratch {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };

  ThreadPool();
  void grow(int count);
  void work(Worker& worker);
  bool arrives_last(int index, int count);
  int64_t take_from(Share& share, int64_t items) const;
  static std::byte* grown(Scratch& scratch, size_t bytes);

  std::vector<Cpu> cpus_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Scratch scratch_[kMaxThreads], rows_scratch_[kMaxThreads];

  RefusingMutex turn_;
  PinnedCaller* caller_ = nullptr;  // of a run on several threads
  Job job_ = nullptr;
  void* context_ = nullptr;
  int count_ = 1;

  Group groups_[kMaxThreads / kGroup];
  alignas(64) std::atomic<int32_t> arrived_groups_{0};
  alignas(64) std::atomic<int64_t> next_item_{0};
  Share shares_[kMaxThreads];
  uint64_t round_ = 0;    // of items: a new one begins with each run and at each barrier
  int64_t barriers_ = 0;  // only the last to arrive writes it
};

// How all threads of a run leave it after the same step. Thread 0 says which one is the last before it comes to the
// barrier after that step. A slow thread may look only when thread 0 is one step ahead, hence the number.
class LastStep {
 public:
  void reset() { last_.store(SIZE_MAX); }
  bool decided() const { return last_.load() != SIZE_MAX; }
  // A barrier after a step; whether it was the last. wanted: what thread 0 says.
  bool passed(const Team& team, size_t step, bool wanted) {
    if (team.index == 0 && wanted) last_.store(step);
    team.barrier();
    return last_.load() <= step;
  }

 private:
  std::atomic<size_t> last_{SIZE_MAX};
};

}  // namespace ingot
