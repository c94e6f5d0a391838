// Runs the threads of a block as fibers, one block after another. See emulated_device.h.
#include "emulated_device.h"

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "group_products.h"

// Swaps stacks: saves the callee's registers on the old one, takes them from the new one.
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulated {

Index block_index, block_size, grid_size;

namespace {

constexpr size_t kStack = 96 << 10;
constexpr size_t kGuard = 4096;  // bytes behind the dynamic shared memory that nobody may touch
constexpr int kMaxWords = 9;

enum class State { kReady, kBarrier, kWarp, kSignal, kDone };

struct Copy {
  void* to;
  const void* from;
  bool valid;
  size_t bytes;
};

void perform(const Copy& copy) {
  check_access(copy.to, copy.bytes, Access::kWrite);
  copy.valid ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
}

struct Fiber {
  std::vector<unsigned char> stack = std::vector<unsigned char>(kStack);
  void* top = nullptr;
  State state = State::kDone;
  const char* name = "";  // the warp instruction it waits for
  int parity = 0;
  std::vector<Copy> copies;
  std::vector<size_t> groups;                                      // copies in each committed group
  size_t open = 0;                                                 // copies since the last commit
  std::vector<std::pair<std::vector<Copy>, const void*>> awaited;  // copies, and the signal that arrives behind them
  bool (*goes_on)(const Fiber&) = nullptr;                         // what it waits for with kSignal
  const void* signal = nullptr;
  unsigned turn = 0;  // parity of a signal, or round of a named barrier
};

// Given `given` times; `missing` arrivals of `count` are missing to the next.
struct Given {
  int count = 0, missing = 0;
  unsigned given = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<uint32_t> words;  // [warps][2 parities][32][kMaxWords]
  std::vector<unsigned char> shared;
  size_t shared_bytes = 0;
  void* scheduler = nullptr;
  size_t current = 0, threads = 0;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  bool backwards = false;
  std::vector<std::pair<const void*, Given>> signals;  // (no std::map: its inline variables would keep a module loaded)
  std::array<Given, 16> named;                         // barriers
};

Block block;
std::jmp_buf failed;
std::string failure;

void enter() {
  block.kernel(block.arguments);
  Fiber& self = block.fibers[block.current];
  self.state = State::kDone;
  emulated_switch(&self.top, block.scheduler);
  std::abort();  // a finished fiber is never resumed
}

void pause(State state) {
  Fiber& self = block.fibers[block.current];
  self.state = state;
  emulated_switch(&self.top, block.scheduler);
}

void start(Fiber& fiber) {
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.data() + kStack) & ~uintptr_t{15};
  auto* stack = reinterpret_cast<void**>(top) - 8;  // six registers, the return address, alignment
  std::memset(stack, 0, 8 * sizeof(void*));
  stack[6] = reinterpret_cast<void*>(&enter);
  fiber.top = stack;
  fiber.state = State::kReady;
  fiber.copies.clear(), fiber.groups.clear(), fiber.open = 0;
  fiber.awaited.clear();
  fiber.parity = 0;
}

// Lanes that wait for the same instruction go on, once every lane of the warp is there.
bool release_warp(size_t first) {
  for (size_t i = first; i < first + 32; ++i) {
    if (block.fibers[i].state != State::kWarp) return false;
  }
  for (size_t i = first; i < first + 32; ++i) {
    if (std::strcmp(block.fibers[i].name, block.fibers[first].name) != 0) {
      failure = std::string("lanes of a warp meet at ") + block.fibers[first].name + " and " + block.fibers[i].name;
      std::longjmp(failed, 1);
    }
    block.fibers[i].state = State::kReady;
  }
  if (std::strcmp(block.fibers[first].name, "syncwarp") == 0) check_warp(first / 32);
  return true;
}

// Runs a warp until it can go no further by itself, so that warps are as far apart as barriers allow: what needs a
// barrier and has none goes wrong.
void run_warp(size_t first) {
  do {
    for (size_t k = 0; k < 32; ++k) {
      block.current = first + (block.backwards ? 31 - k : k);
      Fiber& fiber = block.fibers[block.current];
      if (fiber.state == State::kReady) emulated_switch(&block.scheduler, fiber.top);
    }
  } while (release_warp(first));
}

bool release_barrier() {
  for (size_t i = 0; i < block.threads; ++i) {
    if (block.fibers[i].state != State::kBarrier) return false;
  }
  for (size_t i = 0; i < block.threads; ++i) block.fibers[i].state = State::kReady;
  check_groups();
  check_barrier();
  return true;
}

// Threads whose signal or named barrier has been given meanwhile.
bool release_signals() {
  bool some = false;
  for (size_t i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    if (fiber.state == State::kSignal && fiber.goes_on(fiber)) fiber.state = State::kReady, some = true;
  }
  return some;
}

Given& signal_at(const void* at) {
  for (auto& [place, given] : block.signals) {
    if (place == at) return given;
  }
  fail("an arrival at a signal, or a wait for one, that nobody made");
}

void count_arrival(Given& to) {
  if (--to.missing > 0) return;
  to.missing = to.count, to.given += 1;
  check_barrier();
}

// The oldest copies that a signal waits for, of every thread.
bool release_copies() {
  bool some = false;
  for (size_t i = 0; i < block.threads; ++i) {
    auto& awaited = block.fibers[i].awaited;
    if (awaited.empty()) continue;
    block.current = i;
    for (const Copy& copy : awaited.front().first) perform(copy);
    count_arrival(signal_at(awaited.front().second));
    awaited.erase(awaited.begin());
    some = true;
  }
  return some;
}

void run_block() {
  check_block(block.threads, block.shared.data(), block.shared_bytes);
  start_groups(block.threads);
  block.signals.clear(), block.named.fill({});
  for (size_t i = 0; i < block.threads; ++i) start(block.fibers[i]);
  do {
    for (size_t k = 0; k < block.threads; k += 32) run_warp(block.backwards ? block.threads - 32 - k : k);
  } while (release_barrier() || release_signals() || release_copies());
  check_stop();
  for (size_t i = 0; i < block.threads; ++i) {
    if (block.fibers[i].state != State::kDone) {
      failure = "threads wait for others that are elsewhere: a barrier or a warp instruction in divergent code";
      std::longjmp(failed, 1);
    }
  }
  check_groups();
  check_ended();
  for (size_t i = 0; i < kGuard; ++i) {
    if (block.shared[block.shared_bytes + i] != 0xff) {
      failure = "a write behind the end of shared memory";
      std::longjmp(failed, 1);
    }
  }
}

}  // namespace

Index thread_index() { return {static_cast<unsigned>(block.current), 0, 0}; }
unsigned char* shared_memory() { return block.shared.data(); }
size_t shared_bytes() { return block.shared_bytes; }
bool runs_backwards() { return block.backwards; }
void barrier() { pause(State::kBarrier); }
bool is_own(uintptr_t address, size_t bytes) {
  const auto within = [&](const auto& memory) {
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    return address >= begin && address + bytes <= begin + memory.size() * sizeof(memory[0]);
  };
  return within(block.fibers[block.current].stack) || within(block.words);
}

[[noreturn]] void fail(const char* what) {
  failure = what;
  std::longjmp(failed, 1);
}

const uint32_t* exchange(const char* name, const uint32_t* words, int count) {
  Fiber& self = block.fibers[block.current];
  const size_t warp = block.current / 32, lane = block.current % 32;
  uint32_t* place = block.words.data() + (2 * warp + self.parity) * 32 * kMaxWords;
  for (int i = 0; i < count; ++i) place[lane * count + i] = words[i];
  self.name = name;
  self.parity ^= 1;  // a lane that runs ahead writes elsewhere
  pause(State::kWarp);
  return place;
}

void queue_copy(void* to, const void* from, bool valid, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes)) {
    fail("an asynchronous copy that does not lie on a multiple of its bytes");
  }
  check_access(to, bytes, Access::kWrite);  // from now on it may happen
  if (valid) check_access(from, bytes, Access::kRead);
  if (block.backwards) {
    perform({to, from, valid, bytes});
    return;
  }
  Fiber& self = block.fibers[block.current];
  self.copies.push_back({to, from, valid, bytes});
  self.open += 1;
}

void commit_copies() {
  Fiber& self = block.fibers[block.current];
  self.groups.push_back(self.open);
  self.open = 0;
}

// Copies happen as late as they may; backwards, as early as they may.
void wait_copies(int pending) {
  Fiber& self = block.fibers[block.current];
  while (self.groups.size() > static_cast<size_t>(pending)) {
    for (size_t i = 0; i < self.groups.front(); ++i) {
      perform(self.copies[i]);
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<long>(self.groups.front()));
    self.groups.erase(self.groups.begin());
  }
}

void make_signal(const void* at, int count) { block.signals.push_back({at, {count, count, 0}}); }
void arrive(const void* at) { count_arrival(signal_at(at)); }
void arrive_behind_copies(const void* at) {
  Fiber& self = block.fibers[block.current];
  if (block.backwards) return arrive(at);  // the copies were made at once
  if (!self.groups.empty()) fail("copies that a signal and a group wait for");
  self.awaited.emplace_back(std::move(self.copies), at);
  self.copies.clear(), self.open = 0;
}
void wait_signal(const void* at, unsigned parity) {
  signal_at(at);
  Fiber& self = block.fibers[block.current];
  self.signal = at, self.turn = parity;
  self.goes_on = [](const Fiber& of) { return (signal_at(of.signal).given & 1) != of.turn; };
  if (!self.goes_on(self)) pause(State::kSignal);
}
void meet(int number, int threads, bool waits) {
  Given& at = block.named[static_cast<size_t>(number)];
  if (at.count == 0) at.count = at.missing = threads;
  if (at.count != threads) fail("a named barrier of another number of threads");
  Fiber& self = block.fibers[block.current];
  self.signal = &at, self.turn = at.given;
  self.goes_on = [](const Fiber& of) { return static_cast<const Given*>(of.signal)->given != of.turn; };
  count_arrival(at);
  if (waits && !self.goes_on(self)) pause(State::kSignal);
}

}  // namespace emulated

// Runs a grid. Returns null, or what went wrong; the text is valid until the next launch.
extern "C" const char* emulated_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, unsigned threads,
                                       unsigned shared_bytes, int backwards) {
  using namespace emulated;
  if (threads == 0 || threads % 32) return "a block that is no whole number of warps";
  block.backwards = backwards != 0;
  block.kernel = kernel, block.arguments = arguments, block.threads = threads, block.shared_bytes = shared_bytes;
  if (block.fibers.size() < threads) block.fibers.resize(threads);
  block.words.assign(threads / 32 * 2 * 32 * kMaxWords, 0);
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {static_cast<unsigned>(threads), 1, 1};
  if (setjmp(failed)) {
    check_stop();
    return failure.c_str();
  }
  for (unsigned z = 0; z < grid[2]; ++z) {
    for (unsigned y = 0; y < grid[1]; ++y) {
      for (unsigned x = 0; x < grid[0]; ++x) {
        block_index = {x, y, z};
        block.shared.assign(shared_bytes + kGuard, 0xff);
        run_block();
      }
    }
  }
  return nullptr;
}
