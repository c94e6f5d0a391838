// A mutex that refuses the thread that holds it. Python runs signal handlers in the middle of a step, on the thread
// that asked for the step: a handler that uses the session again would wait for itself.
#pragma once

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace ingot {

class RefusingMutex {
 public:
  // Throws std::invalid_argument where the calling thread holds it.
  void refuse_holder() const {
    if (holder_.load(std::memory_order_relaxed) == std::this_thread::get_id())
      throw std::invalid_argument("this thread is in the middle of a step: a signal handler must leave sessions alone");
  }
  void lock() {
    refuse_holder();
    mutex_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() {
    holder_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
};

}  // namespace ingot
