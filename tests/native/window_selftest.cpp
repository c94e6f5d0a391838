// Ranks as threads of one process, over one window: sums among the ranks of a stage, rows from stage to stage, several
// steps in flight. Each rank has a team of threads. For ThreadSanitizer, which sees one process alone.
//
//   window_selftest STAGES PLACES THREADS STEPS   exit status 1: a wrong number; killed by SIGALRM: all wait for ever
//   window_selftest fails                         ranks give up in the middle of a step, one each time: all others hear
//                                                 of it, and all threads of a rank leave the step together
//   window_selftest late                          a rank is slower than the timeout before it sends rows on, and nobody
//                                                 gives up; then it stands still, and the others name that rank,
//                                                 though others wait for ranks that wait for it
//   window_selftest moves                         bytes of each rank go to the first one and back, between steps
//   window_selftest race                          a rank reads a slot before its owner has come to the meeting, for
//                                                 ThreadSanitizer to report
//
// window.cpp is compiled with -Dmmap=window_mmap -Dmunmap=window_munmap: all ranks have the window at one address, or
// no tool would know that they share it.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ranks/all_reduce_kernel.h"
#include "ranks/recv_kernel.h"
#include "ranks/send_kernel.h"
#include "ranks/slots.h"
#include "ranks/window.h"
#include "threads/threads.h"

namespace {

std::atomic<void*> window_memory{nullptr};
std::atomic<int> mappings{0};

}  // namespace

extern "C" void* window_mmap(void*, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (window_memory.load() == nullptr) window_memory.store(mmap(nullptr, bytes, protection, flags, file, offset));
  mappings.fetch_add(1);
  return window_memory.load();
}

extern "C" int window_munmap(void* memory, size_t bytes) {
  if (mappings.fetch_sub(1) > 1) return 0;
  window_memory.store(nullptr);
  return munmap(memory, bytes);
}

namespace ingot {

namespace {

// Sleeps at once. std::barrier yields the CPU some times first, and each time falls behind all that run beside it.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void arrive_and_wait() {
    std::unique_lock held(mutex_);
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++passed_;
      all_came_.notify_all();
    } else {
      all_came_.wait(held, [this, before = passed_] { return passed_ != before; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_came_;
  int count_, arrived_ = 0;
  int64_t passed_ = 0;
};

}  // namespace

void Team::barrier() const { static_cast<Barrier*>(pool)->arrive_and_wait(); }

namespace {

constexpr int64_t kNumbers = 700;  // of a row that ranks sum, not a multiple of what kernels take at once
constexpr int kSums = 5;           // that a stage makes of a row
constexpr double kTimeout = 30.0;
constexpr unsigned kStandstill = 120;  // seconds without a new step, beyond all timeouts
constexpr double kShortTimeout = 0.5;
constexpr int64_t kLateStep = 5, kMoves = 300;
constexpr int kFailures = 40;  // in a few of which threads of a rank hear of it at different calls
std::atomic<int> wrong{0};     // counted without an order of its own, which would hide what the window lacks

void count(bool is_wrong) {
  if (is_wrong) wrong.fetch_add(1, std::memory_order_relaxed);
}

struct Layout {
  int stages, places, threads;
  int64_t steps;
  int fails_on = -1, fails_in = 0;  // the rank that gives up, and its thread
  bool races = false;
  int late = -1;              // the rank that takes more than the timeout for step kLateStep
  bool stands_still = false;  // in the end
  double timeout = kTimeout;
  bool fails() const { return fails_on >= 0 || stands_still; }
  int ranks() const { return stages * places; }
};

// What a stage makes of a row: sums over its ranks, each of which adds its place.
float after_stage(float before, int places) {
  const auto count = static_cast<float>(places), extra = static_cast<float>(places * (places - 1) / 2);
  for (int sum = 0; sum < kSums; ++sum) before = count * before + extra;
  return before;
}

float row_of(int64_t step, int64_t i) { return static_cast<float>(step % 5 + i % 7); }

class Rank {
 public:
  Rank(const std::string& path, int rank, const Layout& layout)
      : layout_(layout),
        window_(path, rank, {layout.ranks(), kNumbers * 4, 8, layout.stages, 2 * kNumbers * 4}, layout.timeout),
        meeting_(layout.threads),
        row_(kNumbers),
        part_(kNumbers),
        sum_(kNumbers),
        extra_(kNumbers) {}

  Window& window() { return window_; }

  void run() {
    std::vector<std::thread> team;
    for (int index = 1; index < layout_.threads; ++index) team.emplace_back([this, index] { follow(index); });
    follow(0);
    for (std::thread& each : team) each.join();
  }

 private:
  void follow(int index) {
    const Team team{.index = index, .count = layout_.threads, .pool = &meeting_};
    std::minstd_rand random(static_cast<unsigned>(100 * window_.rank() + index));
    while (true) {
      if (index == 0) next_ = begin();
      team.barrier();
      const int64_t step = next_;
      if (step < 0) return;
      const bool done = compute(team, step, random);
      team.barrier();
      if (!done) return;
    }
  }

  // The number that the step's batch holds; -1: there is none. On thread 0.
  int64_t begin() {
    alarm(kStandstill);
    last_call_.reset();
    try {
      if (window_.rank() > 0) {
        std::vector<int32_t> batch;
        return window_.next_step(batch, [] { return false; }) == NextStep::kBegun ? batch.at(0) : -1;
      }
      for (; announced_ < layout_.steps && announced_ < begun_ + layout_.stages; ++announced_) {
        const auto number = static_cast<int32_t>(announced_);
        window_.announce({&number, 1});
      }
      if (begun_ == layout_.steps) {
        window_.close();
        return -1;
      }
      window_.begin_step();
      return begun_++;
    } catch (const RankError&) {
      count(!layout_.fails());
      return -1;
    }
  }

  // False, on all threads of the team: the group has failed. Threads hear of that at different times, so thread 0 says
  // behind which barrier all of them leave, as in a session: who left alone would keep the others waiting at the next.
  bool compute(const Team& team, int64_t step, std::minstd_rand& random) {
    size_t call = 0;
    const auto failed = [&] { return last_call_.passed(team, call++, team.index == 0 && window_.failed()); };
    const auto dawdle = [&] {
      if (random() % 4 == 0) usleep(random() % 40);
    };
    const int stage = window_.stage(), last = layout_.stages - 1;
    const Team::Range own = team.share(kNumbers);
    if (window_.rank() == layout_.fails_on && team.index == layout_.fails_in && step == 5)
      window_.fail("a rank gives up");
    if (stage > 0) {
      dawdle();
      recv({&window_, {0, 0, "rows"}, row_.data(), 1, kNumbers}, team);
      recv({&window_, {1, kNumbers * 4, "extras"}, extra_.data(), 1, kNumbers}, team);
      if (failed()) return false;
      for (int64_t i = own.begin; i < own.end; ++i) check(extra_[i] == row_of(step, i));
    } else {
      for (int64_t i = own.begin; i < own.end; ++i) row_[i] = row_of(step, i);
    }
    Slots slots;
    const float* before = nullptr;  // the sums of the collective before, where they are read once more
    for (int number = 0; number < kSums; ++number) {
      dawdle();
      // Steps of a plan: the collective, which reads sums, and what reads those of the one before again.
      const size_t at = 3 * static_cast<size_t>(number);
      const bool common = (step + number) % 3 > 0, again = (step + number) % 5 > 1 && number + 1 < kSums;
      const std::optional<size_t> last = number == 0 ? std::nullopt : std::optional(at - 3);
      const int slot = slots.take(last, !common ? at : again ? at + 5 : at + 1);
      float* const x = common ? reinterpret_cast<float*>(window_.own(slot)) : part_.data();
      for (int64_t i = own.begin; i < own.end; ++i) x[i] = row_[i] + static_cast<float>(window_.place());
      team.barrier();
      if (layout_.races) {
        row_[0] += *window_.of(slot, (window_.place() + 1) % layout_.places);
        usleep(500);
      }
      float* const sum = common ? reinterpret_cast<float*>(window_.common(slot)) : sum_.data();
      const Meeting meeting{2 * number + 1, slot, "sum"};
      all_reduce({&window_, meeting, common ? nullptr : x, sum, 1, kNumbers, common}, team);
      if (failed()) return false;
      if (before != nullptr) dawdle();
      for (int64_t i = own.begin; i < own.end; ++i) {
        check(before == nullptr || before[i] == row_[i]);
        row_[i] = sum[i];
      }
      before = again && common ? sum : nullptr;
      if (team.index == 0) window_.beat();
    }
    if (window_.rank() == layout_.late && step == kLateStep) take_long();
    if (stage < last) {
      dawdle();
      for (int64_t i = own.begin; i < own.end; ++i) extra_[i] = row_of(step, i);
      team.barrier();
      send({&window_, {0, 0, "rows"}, row_.data(), 1, kNumbers}, team);
      send({&window_, {1, kNumbers * 4, "extras"}, extra_.data(), 1, kNumbers}, team);
      return !failed();
    }
    for (int64_t i = own.begin; i < own.end; ++i) {
      float expected = row_of(step, i);
      for (int each = 0; each < layout_.stages; ++each) expected = after_stage(expected, layout_.places);
      check(layout_.races || row_[i] == expected);
    }
    return true;
  }

  // Three times the timeout in calls that are shorter; then the rank says nothing more until the others have given up.
  void take_long() {
    constexpr int kCalls = 10;
    for (int call = 0; call < kCalls; ++call, window_.beat()) sleep(3 * layout_.timeout / kCalls);
    while (layout_.stands_still && !window_.failed()) sleep(0.01);
  }

  static void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

  // Numbers of a group that has failed need not be right: a thread may have heard of it after the others had looked.
  void check(bool is_right) const { count(!is_right && !window_.failed()); }

  Layout layout_;
  Window window_;
  Barrier meeting_;
  LastStep last_call_;  // of a step, after which the team leaves it
  std::vector<float> row_, part_, sum_, extra_;
  int64_t announced_ = 0, begun_ = 0, next_ = 0;
};

int run(const Layout& layout) {
  const int file = memfd_create("ranks", 0);
  const WindowShape shape{layout.ranks(), kNumbers * 4, 8, layout.stages, 2 * kNumbers * 4};
  if (file < 0 || ftruncate(file, static_cast<off_t>(shape.bytes())) != 0) return 2;
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < layout.ranks(); ++rank) ranks.push_back(std::make_unique<Rank>(path, rank, layout));
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& each : threads) each.join();
  for (auto& rank : ranks) {
    const Window& window = rank->window();
    const std::string words = layout.late < 0 ? "a rank gives up" : "rank " + std::to_string(layout.late) + " did not";
    const bool right = layout.fails() ? window.failure().starts_with(words) : !window.failed();
    if (!right) std::printf("rank %d: %s\n", window.rank(), window.failed() ? window.failure().c_str() : "no failure");
    count(!right);
  }
  if (!layout.fails())
    std::printf("%d stages of %d ranks of %d threads, %ld steps: %d times wrong\n", layout.stages, layout.places,
                layout.threads, static_cast<long>(layout.steps), wrong.load());
  ::close(file);
  return wrong.load() == 0 ? 0 : 1;
}

int run_that_fails() {
  Layout layout{.stages = 2, .places = 2, .threads = 2, .steps = 20};
  for (int time = 0; time < kFailures; ++time) {
    layout.fails_on = time % layout.ranks();
    layout.fails_in = time / layout.ranks() % layout.threads;
    if (const int status = run(layout); status != 0) return status;
  }
  std::printf("a rank of %d gave up %d times: %d times wrong\n", layout.ranks(), kFailures, wrong.load());
  return 0;
}

int run_late() {
  for (const bool stands_still : {false, true})
    for (const int late : {2, 3}) {
      const Layout layout{.stages = 2,
                          .places = 2,
                          .threads = 1,
                          .steps = 20,
                          .late = late,
                          .stands_still = stands_still,
                          .timeout = kShortTimeout};
      if (const int status = run(layout); status != 0) return status;
    }
  return 0;
}

// What a rank has in the end is what it has sent to the first one, of other lengths each time. Of `alike` neighbours,
// the first one sends, and all get it.
void move_bytes(Window& window, int alike) {
  std::vector<std::byte> own(kNumbers * 4);
  const auto value = [](int move, int rank, size_t i) { return static_cast<std::byte>(7 * move + 31 * rank + i % 11); };
  const auto length = [&](int move, int rank) { return static_cast<size_t>((move * 37 + rank * 101) % kNumbers) + 1; };
  std::vector<std::vector<std::byte>> all(static_cast<size_t>(window.count()), own);
  for (int move = 0; move < kMoves; ++move) {
    std::vector<std::span<std::byte>> to;
    std::vector<std::span<const std::byte>> from;
    for (int rank = 0; rank < window.count(); rank += alike) {
      std::vector<std::byte>& part = all[static_cast<size_t>(rank)];
      to.emplace_back(part.data(), length(move, rank));
      from.emplace_back(part.data(), length(move, rank));
    }
    const int sender = window.rank() / alike * alike;
    const std::span<std::byte> mine(own.data(), length(move, sender));
    if (window.rank() == 0)
      for (size_t i = 0; i < mine.size(); ++i) all[0][i] = value(move, 0, i);
    for (const bool back : {false, true}) {
      if (window.rank() == 0) {
        const int32_t number = move;
        window.announce({&number, 1});
        window.begin_step();
      } else {
        std::vector<int32_t> batch;
        count(window.next_step(batch, [] { return false; }) != NextStep::kBegun || batch != std::vector{move});
        for (size_t i = 0; i < mine.size(); ++i) mine[i] = back ? std::byte{0} : value(move, sender, i);
      }
      count(!(back ? window.scatter(mine, from, alike) : window.gather(mine, to, alike)));
      for (int rank = alike; rank < window.count() && window.rank() == 0; rank += alike)
        for (size_t i = 0; i < length(move, rank); ++i)
          count(all[static_cast<size_t>(rank)][i] != value(move, rank, i));
    }
    for (size_t i = 0; i < mine.size() && window.rank() > 0; ++i) count(mine[i] != value(move, sender, i));
  }
}

int run_moves() {
  for (const auto& [stages, alike] : {std::pair{1, 1}, {1, 2}, {1, 4}, {2, 1}, {2, 2}}) {
    const int ranks = 4, file = memfd_create("ranks", 0);
    const WindowShape shape{ranks, kNumbers * 4, 8, stages, 64};
    if (file < 0 || ftruncate(file, static_cast<off_t>(shape.bytes())) != 0) return 2;
    std::vector<std::unique_ptr<Window>> windows;
    std::vector<std::thread> threads;
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    for (int rank = 0; rank < ranks; ++rank) windows.push_back(std::make_unique<Window>(path, rank, shape, kTimeout));
    for (auto& window : windows) threads.emplace_back([&window, alike = alike] { move_bytes(*window, alike); });
    for (std::thread& each : threads) each.join();
    std::printf("%d stages, %d alike, %ld moves: %d times wrong\n", stages, alike, static_cast<long>(kMoves),
                wrong.load());
    ::close(file);
  }
  return wrong.load() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ingot

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "race") return ingot::run({.stages = 1, .places = 2, .threads = 1, .steps = 20, .races = true});
  if (what == "fails") return ingot::run_that_fails();
  if (what == "late") return ingot::run_late();
  if (what == "moves") return ingot::run_moves();
  if (argc == 5)
    return ingot::run({.stages = std::atoi(argv[1]),
                       .places = std::atoi(argv[2]),
                       .threads = std::atoi(argv[3]),
                       .steps = std::atol(argv[4])});
  std::fprintf(stderr, "usage: window_selftest STAGES PLACES THREADS STEPS | fails | late | moves | race\n");
  return 2;
}
