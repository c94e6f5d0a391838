// Runs small teams of plugins/cpu/threads/threads.cpp through every interleaving of their atomic accesses.
//
// threads.cpp is compiled here as it is, with groups of 2 threads instead of 8, over atomics, threads and futexes of
// this file. Every thread is a coroutine that hands over to the search before each access; the search goes through all
// orders and, where a job asks to be stopped or not, all answers. A state is the pool, what the checks note, and the
// stacks of all threads; states seen before are left. Accesses take effect in one order: what weaker orders of memory
// allow is ThreadSanitizer's to find.
//
// Checked: nobody passes a barrier before all of the team have come; every thread of a team, and no other, takes part
// once in each run; all leave a stopped run after the same step; nobody waits for ever; counters are zero at the end;
// each item of a step is taken once; some order comes to an end.
//
//   interleavings FAULT STEPS[:ITEMS] SIZE...   runs of teams of these sizes, one after the other, with so many steps,
//                                               in each of which the team takes so many items. FAULT: none, or a name
//                                               that test_threads.py has put into its copy of threads.cpp. Exit status
//                                               1: a check failed.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

// All that threads.cpp includes, before names in it get other meanings.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <cctype>
#include <chrono>
#include <climits>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "ingot/kernel.h"
#include "threads/refusing_mutex.h"

namespace search {

constexpr int kMost = 6;                       // threads
constexpr int kMostSteps = 4, kMostItems = 4;  // where there are items
constexpr size_t kStack = 32 << 10, kCleared = 8 << 10;
enum class State { kReady, kAsleep, kOver };

struct Coroutine {
  State state;
  void* top;  // of its stack, while another one runs
  const void* asleep_on;
  int answers, answer;  // how many there are to a question it has asked; the one it gets
  bool spun;            // it has looked once without sleeping
  void (*main)(void*);
  void* context;
};

// What a state consists of beside the stacks. Runs have numbers from 1.
struct World {
  Coroutine threads[kMost];
  int count;
  int run, size;                          // the present run, and of how many threads
  bool stop;                              // thread 0 was told to stop it
  int began[kMost], ended[kMost];         // the last run whose job each thread has begun, and ended
  int came[kMost];                        // to how many barriers of that job
  int left_after[kMost];                  // the step after which it left that job
  uint8_t taken[kMostSteps][kMostItems];  // how often each item of each step of that job was taken
  alignas(64) std::byte heap[5 << 10];    // the pool and its workers
  size_t heap_end;
};

World world;
int num_items;  // of a step
alignas(64) std::byte stacks[kMost][kStack];
void* search_top;
Coroutine* running;
const char* fault = "none";
std::string failure;

extern "C" void hand_over(void** from, void* to);
asm(R"(
.pushsection .text
.globl hand_over
hand_over:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.popsection
)");

std::byte* stack_end(int index) { return stacks[index] + kStack; }
int number_of(const Coroutine* thread) { return static_cast<int>(thread - world.threads); }

// To the search, which comes back when it is this thread's turn.
void point() {
  if (running != nullptr) hand_over(&running->top, search_top);
}

int ask(int answers) {
  running->answers = answers;
  point();
  return running->answer;
}

void fail(const char* format, ...) {
  char words[256];
  va_list list;
  va_start(list, format);
  std::vsnprintf(words, sizeof(words), format, list);
  va_end(list);
  if (failure.empty()) failure = words;
}

void begin() {
  running->main(running->context);
  running->state = State::kOver;
  point();
  std::abort();
}

void add_thread(void (*main)(void*), void* context) {
  if (world.count == kMost) std::abort();
  auto** top = reinterpret_cast<void**>(stack_end(world.count)) - 3;
  *--top = reinterpret_cast<void*>(begin);  // popped by ret, which leaves the stack as a call would
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  world.threads[world.count++] = {State::kReady, top, nullptr, 1, 0, false, main, context};
}

long futex(const void* word, int operation, uint32_t value) {
  point();
  if (operation == FUTEX_WAKE_PRIVATE) {
    for (Coroutine& each : world.threads)
      if (each.state == State::kAsleep && each.asleep_on == word) each.state = State::kReady, each.asleep_on = nullptr;
  } else if (static_cast<const std::atomic<uint32_t>*>(word)->load() == value) {
    running->state = State::kAsleep;
    running->asleep_on = word;
    point();
  }
  return 0;
}

// Each wait looks once, and then sleeps: more looks are the same as a later one.
uint64_t clock_of_waits() {
  if (running == nullptr || !running->spun) return 0;
  running->spun = false;
  return uint64_t{1} << 60;
}

void after_look() { running->spun = true; }

void* allocate(size_t bytes) {
  if (running != nullptr) std::abort();  // a run allocates nothing
  void* place = world.heap + world.heap_end;
  world.heap_end += (bytes + 63) & ~size_t{63};
  if (world.heap_end > sizeof(world.heap)) std::abort();
  return place;
}

}  // namespace search

// Workers come into the world by make_unique; nothing else here has such an alignment.
void* operator new(size_t bytes, std::align_val_t) { return search::allocate(bytes); }
void operator delete(void*, std::align_val_t) noexcept {}
void operator delete(void*, size_t, std::align_val_t) noexcept {}

namespace std {

// Stands for std::atomic in threads.h and threads.cpp. Signed ones of 64 bits are numbers of items.
template <typename T>
class interleaved {
 public:
  constexpr interleaved(T value = T()) : value_(value) {}
  T load(memory_order = memory_order_seq_cst) const { return point(), value_.load(); }
  void store(T value, memory_order = memory_order_seq_cst) { point(), value_.store(value); }
  T fetch_add(T value, memory_order = memory_order_seq_cst) { return point(), value_.fetch_add(value); }
  T fetch_sub(T value, memory_order = memory_order_seq_cst) { return point(), value_.fetch_sub(value); }
  bool compare_exchange_weak(T& seen, T value, memory_order = memory_order_seq_cst) {
    return point(), value_.compare_exchange_strong(seen, value);
  }

 private:
  static void point() {
    if (!is_same_v<T, int64_t> || search::num_items > 0) search::point();
  }
  atomic<T> value_;
};

// Stands for std::thread.
class coroutine_thread {
 public:
  template <typename F>
  explicit coroutine_thread(F f) {
    auto* own = new (search::allocate(sizeof(F))) F(f);
    search::add_thread([](void* context) { (*static_cast<F*>(context))(); }, own);
  }
  void detach() {}
};

}  // namespace std

#define atomic interleaved
#define thread coroutine_thread
#define syscall(number, word, operation, value, ...) search::futex(word, operation, value)
#define __rdtsc search::clock_of_waits
#define _mm_pause search::after_look
#define sched_getaffinity(...) (-1)
#define FAULT(name) (std::string_view(search::fault) == name)
#define private public
#include "threads/threads.cpp"
#undef private
#undef atomic
#undef thread

namespace search {

using ingot::LastStep;
using ingot::Team;
using ingot::ThreadPool;

size_t num_steps;
std::vector<int> sizes;
ThreadPool* pool;
LastStep* last_step;

// A job as Session::execute has it: a barrier after each step, at which all may leave.
void job(void* context, const Team& team) {
  const int me = team.index, run = world.run;
  if (context != &world || team.count != world.size || me >= world.size || world.began[me] == run)
    return fail("thread %d of %d takes part in run %d of %d threads", me, team.count, run, world.size);
  world.began[me] = run;
  world.came[me] = 0;
  for (size_t step = 0; step < num_steps; ++step) {
    if (me == 0 && num_steps > 1) world.stop = ask(2) != 0 || world.stop;
    while (num_items > 0) {
      const int64_t item = team.next_of_shares(num_items);
      if (item == num_items) break;
      if (item < 0 || item > num_items || ++world.taken[step][item] != 1)
        return fail("run %d of %d threads: item %d of step %zu is taken again", run, world.size, static_cast<int>(item),
                    step);
    }
    const int barrier = ++world.came[me];
    const bool left = num_steps > 1 ? last_step->passed(team, step, world.stop) : (team.barrier(), false);
    world.left_after[me] = static_cast<int>(step);
    for (int i = 0; i < world.size; ++i)
      if (world.began[i] != run || world.came[i] < barrier)
        return fail("run %d of %d threads: thread %d left barrier %d before thread %d came", run, world.size, me,
                    barrier, i);
    for (int i = 0; i < num_items; ++i)
      if (world.taken[step][i] != 1)
        return fail("run %d of %d threads: item %d of step %zu is left", run, world.size, i, step);
    if (left) break;
  }
  world.ended[me] = run;
}

void check_run() {
  for (int i = 0; i < kMost; ++i) {
    if ((world.ended[i] == world.run) != (i < world.size)) fail("run %d ended with thread %d in another", world.run, i);
    if (i < world.size && world.left_after[i] != world.left_after[0])
      fail("run %d: threads 0 and %d left after different steps", world.run, i);
  }
  if (last_step->decided() != world.stop) fail("run %d: the wish to stop was lost", world.run);
  std::ranges::fill(world.left_after, 0);
}

void caller(void*) {
  for (const int size : sizes) {
    ++world.run;
    world.size = size;
    world.stop = false;
    last_step->reset();
    std::memset(world.taken, 0, sizeof(world.taken));
    pool->run(size, job, &world);
    check_run();
  }
}

void check_end() {
  bool waits = world.threads[0].state == State::kOver;
  for (int i = 1; i < world.count; ++i)
    waits = waits && world.threads[i].state == State::kAsleep &&
            world.threads[i].asleep_on == &pool->workers_[i - 1]->called.word_;
  if (!waits) fail("all threads wait, for ever, in run %d of %d threads", world.run, world.size);
  for (const auto& group : pool->groups_)
    if (group.arrived.load() != 0 || group.passed.sleepers_.load() != 0)
      fail("a group's counters are not zero at the end");
  if (pool->arrived_groups_.load() != 0) fail("the counter of groups is not zero at the end");
}

std::string state_now() {
  std::string state(reinterpret_cast<const char*>(&world), offsetof(World, heap) + world.heap_end);
  for (int i = 0; i < world.count; ++i) {
    const auto* top = static_cast<const char*>(world.threads[i].top);
    state.append(top, reinterpret_cast<const char*>(stack_end(i)) - top);
  }
  return state;
}

void go_back_to(const std::string& state) {
  const size_t bytes = offsetof(World, heap) + world.heap_end;  // the same in all states
  std::memcpy(static_cast<void*>(&world), state.data(), bytes);
  const char* next = state.data() + bytes;
  for (int i = 0; i < world.count; ++i) {
    auto* top = static_cast<char*>(world.threads[i].top);
    const size_t used = reinterpret_cast<char*>(stack_end(i)) - top;
    std::memcpy(top, next, used);
    next += used;
  }
}

// Frames begin with zeros: what others have left on the stack makes no two states of one.
void step(Coroutine& thread, int answer) {
  thread.answer = answer;
  thread.answers = 1;
  std::memset(static_cast<std::byte*>(thread.top) - kCleared, 0, kCleared);
  running = &thread;
  hand_over(&search_top, thread.top);
  running = nullptr;
  thread.answer = 0;
}

struct Key {
  uint64_t a, b;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const { return key.a; }
};

Key key_of(const std::string& state) {
  Key key{1, 2};
  for (size_t i = 0; i + 8 <= state.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, state.data() + i, 8);
    key.a = (key.a ^ word) * 0x9E3779B97F4A7C15u;
    key.a ^= key.a >> 29;
    key.b = (key.b + word) * 0xC2B2AE3D27D4EB4Fu;
    key.b ^= key.b >> 32;
  }
  return key;
}

// How many states there are, or were until a check failed.
size_t search() {
  std::unordered_set<Key, KeyHash> seen;
  std::vector<std::string> waiting{state_now()};
  bool ends = false;
  seen.insert(key_of(waiting.back()));
  while (!waiting.empty() && failure.empty()) {
    const std::string state = std::move(waiting.back());
    waiting.pop_back();
    go_back_to(state);
    bool any = false;
    for (int i = 0; i < world.count && failure.empty(); ++i) {
      const int answers = world.threads[i].answers;
      for (int answer = 0; answer < answers && world.threads[i].state == State::kReady && failure.empty(); ++answer) {
        any = true;
        step(world.threads[i], answer);
        std::string next = state_now();
        if (seen.insert(key_of(next)).second) waiting.push_back(std::move(next));
        go_back_to(state);
      }
    }
    if (!any) ends = true, check_end();
  }
  if (!ends) fail("no order of accesses comes to an end");
  return seen.size();
}

}  // namespace search

int main(int argc, char** argv) {
  using namespace search;
  if (argc < 4) return 2;
  fault = argv[1];
  char* items = nullptr;
  num_steps = std::strtoul(argv[2], &items, 10);
  if (*items == ':') num_items = std::atoi(items + 1);
  if (num_items > kMostItems || (num_items > 0 && num_steps > kMostSteps)) return 2;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  pool = new (allocate(sizeof(ThreadPool))) ThreadPool;
  last_step = new (allocate(sizeof(LastStep))) LastStep;
  add_thread(caller, nullptr);
  pool->grow(std::ranges::max(sizes));
  const size_t states = search::search();
  std::printf("%zu states%s%s\n", states, failure.empty() ? "" : ": ", failure.c_str());
  return failure.empty() ? 0 : 1;
}
