#include "ranks/window.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <system_error>

namespace ingot {
namespace {

constexpr size_t kPage = 4096, kMostWords = 2000;
constexpr int kPolls = 300;
constexpr int64_t kSliceNs = 50'000'000;    // of a sleep, after which a rank looks whether the others are still there
constexpr int64_t kMostMeetings = 1 << 16;  // of a step; the numbers of all steps wrap around
constexpr const char* kBegin = "the beginning";  // of a step, where its batch is handed over

size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Not of one process (FUTEX_PRIVATE_FLAG): the word lies in shared memory.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec slice{.tv_sec = 0, .tv_nsec = kSliceNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct flock byte_lock(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

std::string rank_word(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

struct alignas(64) Window::Line {
  std::atomic<uint32_t> arrived{0};
  std::atomic<int32_t> sleepers{0};  // who wait for this rank
};

struct Window::Head {
  std::atomic<uint32_t> failed{0};  // 1: the words are being written; 2: they are there
  char words[kMostWords];
  alignas(64) int64_t batch_size;  // of the step that begins; -1: there are no more
  Line lines[kMostRanks];
};

size_t WindowShape::slot_stride() const { return in_pages(static_cast<size_t>(std::max<int64_t>(slot_bytes, 1))); }
size_t WindowShape::slots_begin() const {
  return in_pages(sizeof(uint64_t) * 512 + kMostWords + RankGroup::kMostRanks * 64) +
         in_pages(static_cast<size_t>(batch_words) * sizeof(int32_t));
}
size_t WindowShape::bytes() const {
  return slots_begin() + static_cast<size_t>(RankGroup::kSlots * count) * slot_stride();
}

Window::Window(const std::string& path, int rank, const WindowShape& shape, double timeout)
    : rank_(rank), shape_(shape), timeout_(timeout) {
  if (shape.count < 2 || shape.count > kMostRanks || rank < 0 || rank >= shape.count)
    throw std::invalid_argument("a window is for 2 to " + std::to_string(kMostRanks) + " ranks, got number " +
                                std::to_string(rank) + " of " + std::to_string(shape.count));
  if (shape.slot_bytes < 0 || shape.batch_words < 1 || !(timeout > 0))
    throw std::invalid_argument("a window has slots, room for a batch and a time to wait");
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  const auto refused = [&](const std::string& what) {
    const std::string why = std::generic_category().message(errno);
    if (file_ >= 0) ::close(file_);
    return RankError(rank_word(rank) + " cannot use the window of the ranks, " + path + ": " + what + why);
  };
  if (file_ < 0) throw refused("");
  struct stat known{};
  if (fstat(file_, &known) != 0) throw refused("");
  if (static_cast<size_t>(known.st_size) != shape.bytes()) {
    errno = EINVAL;
    throw refused("it has " + std::to_string(known.st_size) + " bytes, expected " + std::to_string(shape.bytes()) +
                  ": ");
  }
  struct flock lock = byte_lock(rank);
  if (fcntl(file_, F_OFD_SETLK, &lock) != 0) throw refused("another process is " + rank_word(rank) + ": ");
  void* memory = mmap(nullptr, shape.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (memory == MAP_FAILED) throw refused("");
  memory_ = static_cast<std::byte*>(memory);
  static_assert(sizeof(Head) <= sizeof(uint64_t) * 512 + kMostWords + kMostRanks * 64);
  head_ = reinterpret_cast<Head*>(memory_);  // all zeros are a good one
}

Window::~Window() {
  munmap(memory_, shape_.bytes());
  ::close(file_);
}

std::byte* Window::at(int slot, int rank) const {
  return memory_ + shape_.slots_begin() + static_cast<size_t>(slot * shape_.count + rank) * shape_.slot_stride();
}

int32_t* Window::batch() const {
  return reinterpret_cast<int32_t*>(memory_ + shape_.slots_begin() -
                                    in_pages(static_cast<size_t>(shape_.batch_words) * sizeof(int32_t)));
}

uint32_t Window::number(int64_t meeting) const { return static_cast<uint32_t>(step_ * kMostMeetings + meeting); }

bool Window::meet(const Team& team, const Meeting& meeting, size_t) {
  if (failed()) return false;
  if (team.index == 0) arrive(number(meeting.number));
  return wait_for_all(number(meeting.number), meeting.name);
}

void Window::begin_step(std::span<const int32_t> batch) {
  if (std::ssize(batch) > shape_.batch_words)
    throw std::invalid_argument("the batch is too large for the ranks' window");
  if (failed()) throw RankError(failure());
  std::ranges::copy(batch, this->batch());
  head_->batch_size = std::ssize(batch);
  ++step_;
  arrive(number(0));
  if (!wait_for_all(number(0), kBegin)) throw RankError(failure());
}

NextStep Window::next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) {
  ++step_;
  const Waited waited = wait_for(0, number(0), kBegin, &interrupted);
  if (waited == Waited::kInterrupted) --step_;
  if (waited == Waited::kInterrupted) return NextStep::kInterrupted;
  if (waited == Waited::kFailed || failed()) throw RankError(failure());
  const int64_t size = head_->batch_size;
  if (size < 0) return NextStep::kNone;
  batch.assign(this->batch(), this->batch() + std::min(size, shape_.batch_words));
  arrive(number(0));
  if (!wait_for_all(number(0), kBegin)) throw RankError(failure());
  return NextStep::kBegun;
}

void Window::close() {
  if (rank_ != 0 || failed()) return;
  head_->batch_size = -1;
  ++step_;
  arrive(number(0));
}

void Window::arrive(uint32_t number) {
  Line& mine = head_->lines[rank_];
  mine.arrived.store(number);
  if (mine.sleepers.load() > 0) wake_sleepers(mine.arrived);
}

bool Window::wait_for_all(uint32_t number, const char* name) {
  for (int rank = 0; rank < shape_.count; ++rank)
    if (rank != rank_ && wait_for(rank, number, name, nullptr) != Waited::kCame) return false;
  return true;
}

Window::Waited Window::wait_for(int rank, uint32_t number, const char* name, const std::function<bool()>* interrupted) {
  Line& line = head_->lines[rank];
  const auto came = [&] { return static_cast<int32_t>(line.arrived.load(std::memory_order_acquire) - number) >= 0; };
  for (int poll = 0; poll < kPolls; ++poll) {
    if (came()) return Waited::kCame;
    _mm_pause();
  }
  const int64_t begin = now_ns();
  for (int64_t look = begin + kSliceNs;;) {
    line.sleepers.fetch_add(1);
    const uint32_t seen = line.arrived.load();
    if (static_cast<int32_t>(seen - number) < 0 && !failed()) sleep_while(line.arrived, seen);
    line.sleepers.fetch_sub(1);
    if (came()) return Waited::kCame;
    if (failed()) return Waited::kFailed;
    const int64_t now = now_ns();
    if (now < look) continue;
    look = now + kSliceNs;
    if (!is_here(rank) && !came()) {
      fail(rank_word(rank) + " has ended; " + rank_word(rank_) + " waited for it at " + place(name));
    } else if (interrupted != nullptr && (*interrupted)()) {
      return Waited::kInterrupted;
    } else if (interrupted == nullptr && static_cast<double>(now - begin) > 1e9 * timeout_) {
      fail(rank_word(rank) + " did not come to " + place(name) + ": " + rank_word(rank_) + " waited " +
           std::to_string(static_cast<int64_t>(static_cast<double>(now - begin) * 1e-9)) + " s");
    }
  }
}

std::string Window::place(const char* name) const { return std::string(name) + " of step " + std::to_string(step_); }

bool Window::is_here(int rank) const {
  struct flock lock = byte_lock(rank);
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Window::require_all() {
  if (failed()) throw RankError(failure());
  for (int rank = 0; rank < shape_.count; ++rank)
    if (rank != rank_ && !is_here(rank)) throw RankError(rank_word(rank) + " has ended");
}

void Window::fail(const std::string& words) {
  uint32_t none = 0;
  if (!head_->failed.compare_exchange_strong(none, 1)) return;
  const size_t length = std::min(words.size(), kMostWords - 1);
  std::memcpy(head_->words, words.data(), length);
  head_->words[length] = '\0';
  head_->failed.store(2);
  for (int rank = 0; rank < shape_.count; ++rank) wake_sleepers(head_->lines[rank].arrived);
}

bool Window::failed() const { return head_->failed.load(std::memory_order_acquire) != 0; }

std::string Window::failure() const {
  const int64_t end = now_ns() + kSliceNs;  // who writes the words may end before they are there
  while (head_->failed.load(std::memory_order_acquire) == 1 && now_ns() < end) _mm_pause();
  return head_->failed.load(std::memory_order_acquire) == 2 ? head_->words : "a rank has failed";
}

}  // namespace ingot
