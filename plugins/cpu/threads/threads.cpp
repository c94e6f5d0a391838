#include "threads/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <thread>

namespace ingot {
namespace {

constexpr uint64_t kSpinCycles = 100'000;  // of the time stamp counter: 25 to 50 us

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

// The CPUs that share a core with `cpu`, as the system names them: equal text means the same core.
std::string siblings(int cpu) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  std::string list;
  return file >> list ? list : std::to_string(cpu);
}

// Whole CPUs that the control group's quota pays for, or INT_MAX.
int quota_cpus() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (!(file >> quota >> period) || period <= 0) return INT_MAX;
  return std::max(1, static_cast<int>(quota / period + 0.999));
}

// The memory node of a CPU: the number in the name of a link beside its topology. 0 where the system tells none.
int memory_node(int cpu) {
  std::error_code none;
  for (const auto& entry :
       std::filesystem::directory_iterator("/sys/devices/system/cpu/cpu" + std::to_string(cpu), none)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node") && name.size() > 4 && std::isdigit(static_cast<unsigned char>(name[4])))
      return std::stoi(name.substr(4));
  }
  return 0;
}

// The first CPU of each core in the process's affinity mask, node by node.
std::vector<Cpu> usable_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<Cpu> cpus;
  std::set<std::string> seen;
  if (sched_getaffinity(getpid(), sizeof(mask), &mask) != 0) return {{0, 0}};
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &mask) && seen.insert(siblings(cpu)).second) cpus.push_back({cpu, memory_node(cpu)});
  std::ranges::stable_sort(cpus, {}, &Cpu::node);
  if (cpus.size() > static_cast<size_t>(quota_cpus())) cpus.resize(static_cast<size_t>(quota_cpus()));
  return cpus.empty() ? std::vector<Cpu>{{0, 0}} : cpus;
}

void pin(int cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  sched_setaffinity(0, sizeof(mask), &mask);  // where it is not allowed the thread stays unpinned
}

// Blocks the signals that belong to the interpreter's threads: a thread that is started meanwhile inherits what is
// blocked. Not those of a thread's own fault, which would end the process without a word from what handles them
// (faulthandler).
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int fault : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

std::atomic<ThreadPool*> current{nullptr};
std::mutex creation;

// In a forked child: the parent's pool is left alone (its threads and locks are not here) and a new one is made.
void forget_pool() {
  current.store(nullptr);
  new (&creation) std::mutex;
}

}  // namespace

// Pins the caller for the length of a run: a worker pinned to the caller's CPU would wait for it.
class PinnedCaller {
 public:
  explicit PinnedCaller(int cpu) : cpu_(cpu) { begin(); }
  ~PinnedCaller() { end(); }
  PinnedCaller(const PinnedCaller&) = delete;

  void begin() {
    pinned_ = sched_getaffinity(0, sizeof(before_), &before_) == 0;
    if (pinned_) pin(cpu_);
  }
  void end() const {
    if (pinned_) sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  int cpu_;
  cpu_set_t before_;
  bool pinned_;
};

void Signal::wait(uint32_t old) {
  for (const uint64_t start = __rdtsc(); __rdtsc() - start < kSpinCycles; _mm_pause())
    if (value() != old) return;
  sleepers_.fetch_add(1);
  while (word_.load() == old) futex(&word_, FUTEX_WAIT_PRIVATE, old);
  sleepers_.fetch_sub(1);
}

void Signal::advance() {
  word_.fetch_add(1);
  if (sleepers_.load() > 0) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

struct ThreadPool::Worker {
  int index = 0;
  Signal called;
};

ThreadPool::ThreadPool() : cpus_(usable_cpus()) {}

ThreadPool& ThreadPool::instance() {
  if (ThreadPool* pool = current.load()) return *pool;
  static const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)at_fork;
  const std::lock_guard lock(creation);
  if (current.load() == nullptr) current.store(new ThreadPool);  // never deleted: its threads end with the process
  return *current.load();
}

void ThreadPool::start(int count) {
  const std::lock_guard lock(turn_);
  grow(std::clamp(count, 1, kMaxThreads));
}

void ThreadPool::grow(int count) {
  if (static_cast<int>(workers_.size()) >= count - 1) return;
  const BlockedSignals blocked;
  while (static_cast<int>(workers_.size()) < count - 1) {
    workers_.reserve(workers_.size() + 1);  // nothing may fail between the thread's start and its place in the list
    auto worker = std::make_unique<Worker>();
    worker->index = static_cast<int>(workers_.size()) + 1;
    try {
      std::thread([this, self = worker.get()] { work(*self); }).detach();
    } catch (const std::system_error& error) {
      throw ThreadStartError("thread " + std::to_string(worker->index + 1) + " of " + std::to_string(count) + ": " +
                             error.code().message());
    }
    workers_.push_back(std::move(worker));
  }
}

void ThreadPool::work(Worker& worker) {
  pin(cpus_[static_cast<size_t>(worker.index) % cpus_.size()].number);
  for (uint32_t seen = 0;; ++seen) {
    worker.called.wait(seen);
    const int count = count_;
    Team team;
    team.index = worker.index;
    team.count = count;
    team.pool = this;
    job_(context_, team);
    barrier(team.index, count);
  }
}

void ThreadPool::run(int count, Job job, void* context) {
  const std::lock_guard lock(turn_);
  count = std::clamp(count, 1, kMaxThreads);
  Team team;
  team.count = count;
  team.pool = this;
  next_item_.store(0, std::memory_order_relaxed);
  groups_[0].next_item.store(0, std::memory_order_relaxed);
  ++round_;
  if (count == 1) return job(context, team);
  grow(count);
  job_ = job;
  context_ = context;
  count_ = count;
  PinnedCaller caller(cpus_[0].number);
  caller_ = &caller;
  for (int i = 0; i < count - 1; ++i) workers_[static_cast<size_t>(i)]->called.advance();
  job(context, team);
  barrier(0, count);
  caller_ = nullptr;
}

bool ThreadPool::ask_unpinned(const std::function<bool()>& question) {
  if (caller_ == nullptr) return question();
  caller_->end();
  const bool answer = question();
  caller_->begin();  // with the CPUs that the thread has now, in case the question has changed them
  return answer;
}

// Group 0 is released last: thread 0 is in it, and may begin the next run at once. A larger team would use a group
// whose release of this barrier is still to come, and would take it for one of its own.
void ThreadPool::barrier(int index, int count) {
  Group& mine = groups_[index / kGroup];
  const uint32_t phase = mine.passed.value();
  if (!arrives_last(index, count)) return mine.passed.wait(phase);
  next_item_.store(0, std::memory_order_relaxed);
  ++round_;
  ++barriers_;
  for (int first = 0; first < count; first += kGroup)
    groups_[first / kGroup].next_item.store(0, std::memory_order_relaxed);
  if (count > 1)
    for (int group = (count - 1) / kGroup; group >= 0; --group) groups_[group].passed.advance();
}

// Counters are back at zero before anyone can come to the next barrier.
bool ThreadPool::arrives_last(int index, int count) {
  std::atomic<int32_t>& arrived = groups_[index / kGroup].arrived;
  const int begin = index / kGroup * kGroup, members = std::min(kGroup, count - begin);
  if (arrived.fetch_add(1) + 1 < members) return false;
  arrived.store(0, std::memory_order_relaxed);
  const int groups = (count + kGroup - 1) / kGroup;
  if (groups > 1 && arrived_groups_.fetch_add(1) + 1 < groups) return false;
  arrived_groups_.store(0, std::memory_order_relaxed);
  return true;
}

// Who gets a number below `items` finds an item: as many are left as there are such numbers, and shares only shrink.
int64_t ThreadPool::next_of_shares(const Team::Range& owners, int index, int64_t number, int64_t items) {
  if (number >= items || items >> Share::kBits != 0) return std::min(number, items);
  const int64_t count = owners.end - owners.begin;
  for (int64_t owner = index - owners.begin;; owner = (owner + 1) % count) {
    const int64_t begin = items * owner / count, end = items * (owner + 1) / count;
    const int64_t taken = take_from(shares_[owners.begin + owner], end - begin);
    if (taken >= 0) return begin + taken;
  }
}

// The number of an item of a share, or -1 where none is left.
int64_t ThreadPool::take_from(Share& share, int64_t items) const {
  const uint64_t none = round_ << Share::kBits;
  uint64_t seen = share.taken.load(std::memory_order_relaxed), taken = 0;
  do {
    taken = seen >> Share::kBits == none >> Share::kBits ? seen - none : 0;
    if (static_cast<int64_t>(taken) >= items) return -1;
  } while (!share.taken.compare_exchange_weak(seen, none + taken + 1, std::memory_order_relaxed));
  return static_cast<int64_t>(taken);
}

double ThreadPool::barrier_seconds(int count) {
  constexpr int kMany = 20'000;
  const auto begin = std::chrono::steady_clock::now();
  run(
      count,
      [](void*, const Team& team) {
        for (int i = 0; i < kMany; ++i) team.barrier();
      },
      nullptr);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kMany;
}

std::byte* ThreadPool::grown(Scratch& mine, size_t bytes) {
  if (mine.bytes >= bytes) return mine.data;
  if (mine.data != nullptr) munmap(mine.data, mine.bytes);
  mine.bytes = (bytes + 0xFFFF) & ~size_t{0xFFFF};
  void* memory = mmap(nullptr, mine.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {  // address space is exhausted inside a kernel: nothing can be unwound here
    std::fprintf(stderr, "ingot: no address space for %zu bytes of kernel scratch\n", mine.bytes);
    std::abort();
  }
  return mine.data = static_cast<std::byte*>(memory);
}

void Team::barrier() const { static_cast<ThreadPool*>(pool)->barrier(index, count); }
int64_t Team::next_item() const { return static_cast<ThreadPool*>(pool)->next_item(); }
int64_t Team::next_of_shares(int64_t items) const {
  auto* threads = static_cast<ThreadPool*>(pool);
  return threads->next_of_shares({0, count}, index, threads->next_item(), items);
}
int64_t Team::next_of_group_shares(int64_t items) const {
  auto* threads = static_cast<ThreadPool*>(pool);
  return threads->next_of_shares(group(), index, threads->next_of_group(index), items);
}
int64_t Team::items_taken() const { return static_cast<ThreadPool*>(pool)->items_taken(); }
std::byte* Team::scratch(size_t bytes) const { return static_cast<ThreadPool*>(pool)->scratch(index, bytes); }
std::byte* Team::rows_scratch(size_t bytes) const { return static_cast<ThreadPool*>(pool)->rows_scratch(index, bytes); }

}  // namespace ingot
