// The one thread pool of the process. Workers are pinned, spin for some 40 us between steps, then sleep.
//
// At a barrier, threads meet in groups of kGroup neighbours, and the last of each group meets those of the others: of 64
// threads never more than 8 write to one cache line, or wait for one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ingot/kernel.h"

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

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256, kGroup = 8;

  using Job = void (*)(void* context, const Team& team);

  // Made at first use, and anew in a forked child, which has none of its parent's threads.
  static ThreadPool& instance();

  // Calls job on `count` threads at once, the caller being thread 0, and returns when all have finished.
  // Callers take turns. The job must not throw.
  void run(int count, Job job, void* context);

  void barrier(int index, int count);
  double barrier_seconds(int count);  // of one among many in a row
  int64_t take() { return next_item_.fetch_add(1, std::memory_order_relaxed); }
  int64_t taken() const { return next_item_.load(std::memory_order_relaxed); }
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
  };
  struct Scratch {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };

  ThreadPool();
  void grow(int count);
  void work(Worker& worker);
  bool arrives_last(int index, int count);
  static std::byte* grown(Scratch& scratch, size_t bytes);

  std::vector<Cpu> cpus_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Scratch scratch_[kMaxThreads], rows_scratch_[kMaxThreads];

  std::mutex turn_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  int count_ = 1;

  Group groups_[kMaxThreads / kGroup];
  alignas(64) std::atomic<int32_t> arrived_groups_{0};
  alignas(64) std::atomic<int64_t> next_item_{0};
  int64_t barriers_ = 0;  // only the last to arrive writes it
};

}  // namespace ingot
