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
#include <utility>

namespace ingot {
namespace {

constexpr size_t kPage = 4096, kMostWords = 2000;
constexpr size_t kHeadBytes = 4096 + kMostWords + RankGroup::kMostRanks * 256;
constexpr uint64_t kSpinCycles = 100'000;  // of the time stamp counter: 25 to 50 us, about what a sleep takes
constexpr int64_t kSliceNs = 50'000'000;   // of a sleep, after which a rank looks whether the others are still there
constexpr int64_t kMostOfALook = 2 * kSliceNs;   // that counts: who looks later has been stopped, or waits for a core
constexpr const char* kBegin = "the beginning";  // of a step, where its batch is handed over
constexpr const char* kMove = "the copy of a KV block";
constexpr int64_t kMoved = 1;  // the meeting to which a rank comes when bytes lie in its slot

// The numbers of all steps wrap around.
uint32_t step_number(int64_t step) { return static_cast<uint32_t>(step * RankGroup::kMostMeetings); }

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

struct alignas(64) Window::Word {
  std::atomic<uint32_t> value{0};
  std::atomic<int32_t> sleepers{0};  // who wait for it
};

struct Window::Line {
  Word arrived;      // the last meeting that the rank has come to
  Word sent, taken;  // the last message that it has passed on, and that the next stage has read
  alignas(64) std::atomic<uint32_t> beats{0};
};

struct Window::Head {
  std::atomic<uint32_t> failed{0};  // 1: the words are being written; 2: they are there
  char words[kMostWords];
  Word announced;                                          // the last step whose batch is there
  alignas(64) int64_t batch_size[batches_of(kMostRanks)];  // -1: there are no more steps
  Line lines[kMostRanks];
};

size_t WindowShape::batches_begin() const { return in_pages(kHeadBytes); }
size_t WindowShape::batch_stride() const { return in_pages(static_cast<size_t>(batch_words) * sizeof(int32_t)); }
size_t WindowShape::slots_begin() const {
  return batches_begin() + static_cast<size_t>(RankGroup::batches_of(stages)) * batch_stride();
}
size_t WindowShape::slot_stride() const { return in_pages(static_cast<size_t>(std::max<int64_t>(slot_bytes, 1))); }
size_t WindowShape::messages_begin() const {
  return slots_begin() + static_cast<size_t>(RankGroup::kSlots * count) * slot_stride();
}
size_t WindowShape::messages_stride() const { return in_pages(static_cast<size_t>(message_bytes)); }
size_t WindowShape::bytes() const {
  return messages_begin() + static_cast<size_t>(RankGroup::kSteps * count) * messages_stride();
}

Window::Window(const std::string& path, int rank, const WindowShape& shape, double timeout)
    : RankGroup(rank, shape.count, shape.stages), shape_(shape), timeout_(timeout) {
  if (shape.slot_bytes < 0 || shape.batch_words < 1 || shape.message_bytes < 0 || !(timeout > 0))
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
  static_assert(sizeof(Head) <= kHeadBytes);
  head_ = reinterpret_cast<Head*>(memory_);  // all zeros are a good one
}

Window::~Window() {
  munmap(memory_, shape_.bytes());
  ::close(file_);
}

std::byte* Window::at(int slot, int rank) const {
  return memory_ + shape_.slots_begin() + static_cast<size_t>(slot * shape_.count + rank) * shape_.slot_stride();
}

std::byte* Window::messages_of(int rank) const {
  const auto place = static_cast<size_t>((step_ % kSteps) * shape_.count + rank);
  return memory_ + shape_.messages_begin() + place * shape_.messages_stride();
}

int32_t* Window::batch(int64_t step) const {
  const auto place = static_cast<size_t>(step % batches());
  return reinterpret_cast<int32_t*>(memory_ + shape_.batches_begin() + place * shape_.batch_stride());
}

uint32_t Window::number(int64_t meeting) const { return step_number(step_) + static_cast<uint32_t>(meeting); }

bool Window::meet(const Team& team, const Meeting& meeting, size_t) {
  if (failed()) return false;
  if (team.index == 0) store(head_->lines[rank()].arrived, number(meeting.number));
  return meet_all(number(meeting.number), meeting.name);
}

// Every thread comes to the barriers, also where its wait has failed: others may have waited in vain or not.
bool Window::send(const Team& team, const Message& message, const float* x, int64_t n) {
  Line& mine = head_->lines[rank()];
  uint32_t& before = sent_[static_cast<size_t>(step_ % kSteps)];
  const bool free = !failed() && (message.index > 0 || wait_for(mine.taken, rank() - places(), before, message.name,
                                                                Patience::kTimeout) == Waited::kCame);
  if (free) {
    const Team::Range own = team.share(n);
    std::copy(x + own.begin, x + own.end, reinterpret_cast<float*>(messages_of(rank()) + message.offset) + own.begin);
  }
  team.barrier();
  if (free && team.index == 0) {
    before = number(message.index + 1);
    store(mine.sent, before);
  }
  return free;
}

bool Window::receive(const Team& team, const Message& message, float* y, int64_t n) {
  const int from = rank() + places();
  Line& its = head_->lines[from];
  const uint32_t wanted = number(message.index + 1);
  const bool came = !failed() && wait_for(its.sent, from, wanted, message.name, Patience::kTimeout) == Waited::kCame;
  if (came) {
    const Team::Range own = team.share(n);
    const auto* x = reinterpret_cast<const float*>(messages_of(from) + message.offset);
    std::copy(x + own.begin, x + own.end, y + own.begin);
  }
  team.barrier();
  if (came && team.index == 0) store(its.taken, wanted);
  return came;
}

void Window::beat() { head_->lines[rank()].beats.fetch_add(1, std::memory_order_relaxed); }

std::vector<uint32_t> Window::beats() const {
  std::vector<uint32_t> found;
  for (int rank = 0; rank < count(); ++rank) found.push_back(head_->lines[rank].beats.load(std::memory_order_relaxed));
  return found;
}

void Window::announce(std::span<const int32_t> batch) {
  if (std::ssize(batch) > shape_.batch_words)
    throw std::invalid_argument("the batch is too large for the ranks' window");
  if (failed()) throw RankError(failure());
  const int64_t step = announced_ + 1;
  for (int other = 0; other < count() && step > batches(); ++other)  // that have copied what lay there
    if (other != rank() && wait_for(head_->lines[other].arrived, other, step_number(step - batches()), kBegin,
                                    Patience::kTimeout) != Waited::kCame)
      throw RankError(failure());
  std::ranges::copy(batch, this->batch(step));
  head_->batch_size[step % batches()] = std::ssize(batch);
  announced_ = step;
  store(head_->announced, step_number(step));
}

void Window::begin_step() {
  if (failed()) throw RankError(failure());
  ++step_;
  store(head_->lines[rank()].arrived, number(0));
  if (!meet_all(number(0), kBegin)) throw RankError(failure());
}

NextStep Window::next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) {
  ++step_;
  const Waited waited = wait_for(head_->announced, 0, number(0), kBegin, Patience::kForEver, &interrupted);
  if (waited == Waited::kInterrupted) --step_;
  if (waited == Waited::kInterrupted) return NextStep::kInterrupted;
  if (waited == Waited::kFailed || failed()) throw RankError(failure());
  const int64_t size = head_->batch_size[step_ % batches()];
  if (size < 0) return NextStep::kNone;
  const int32_t* const begin = this->batch(step_);
  batch.assign(begin, begin + std::min(size, shape_.batch_words));
  store(head_->lines[rank()].arrived, number(0));
  if (!meet_all(number(0), kBegin)) throw RankError(failure());
  return NextStep::kBegun;
}

// Slots are free: all ranks of a stage have begun the step, and so have read what others of it brought to the one
// before.
bool Window::gather(std::span<const std::byte> own, std::span<const std::span<std::byte>> parts, int alike) {
  if (rank() % alike != 0) return !failed();
  if (rank() > 0) {
    std::ranges::copy(own, this->own(0));
    store(head_->lines[rank()].arrived, number(kMoved));
    return !failed();
  }
  for (int other = alike; other < count(); other += alike) {
    if (wait_for(head_->lines[other].arrived, other, number(kMoved), kMove, Patience::kTimeout) != Waited::kCame)
      return false;
    const std::span<std::byte> to = parts[static_cast<size_t>(other / alike)];
    std::copy_n(at(0, other), to.size(), to.begin());
  }
  return !failed();
}

// Ranks that have the same bytes read them from the slot of the first of them.
bool Window::scatter(std::span<std::byte> own, std::span<const std::span<const std::byte>> parts, int alike) {
  if (rank() > 0) {
    if (wait_for(head_->lines[0].arrived, 0, number(kMoved), kMove, Patience::kTimeout) != Waited::kCame) return false;
    std::copy_n(at(0, rank() / alike * alike), own.size(), own.begin());
    return !failed();
  }
  for (int other = 1; other < count(); ++other)
    if (wait_for(head_->lines[other].arrived, other, number(0), kBegin, Patience::kTimeout) != Waited::kCame)
      return false;
  for (int first = alike == 1 ? 1 : 0; first < count(); first += alike)
    std::ranges::copy(parts[static_cast<size_t>(first / alike)], at(0, first));
  store(head_->lines[0].arrived, number(kMoved));
  return !failed();
}

void Window::close() {
  if (rank() != 0 || failed()) return;
  head_->batch_size[++announced_ % batches()] = -1;
  store(head_->announced, step_number(announced_));
}

void Window::store(Word& word, uint32_t number) {
  word.value.store(number);
  if (word.sleepers.load() > 0) wake_sleepers(word.value);
}

bool Window::meet_all(uint32_t number, const char* name) {
  const int first = rank() - place();
  for (int other = first; other < first + places(); ++other)
    if (other != rank() &&
        wait_for(head_->lines[other].arrived, other, number, name, Patience::kTimeout) != Waited::kCame)
      return false;
  return true;
}

Window::Waited Window::wait_for(Word& word, int rank, uint32_t number, const char* name, Patience patience,
                                const std::function<bool()>* interrupted) {
  const auto came = [&] { return static_cast<int32_t>(word.value.load(std::memory_order_acquire) - number) >= 0; };
  for (const uint64_t start = __rdtsc(); __rdtsc() - start < kSpinCycles; _mm_pause())
    if (came()) return Waited::kCame;
  int64_t looked = now_ns(), silent = 0;  // ns without a beat of that rank
  uint32_t beats = head_->lines[rank].beats.load(std::memory_order_relaxed);
  for (;;) {
    word.sleepers.fetch_add(1);
    const uint32_t seen = word.value.load();
    if (static_cast<int32_t>(seen - number) < 0 && !failed()) sleep_while(word.value, seen);
    word.sleepers.fetch_sub(1);
    if (came()) return Waited::kCame;
    if (failed()) return Waited::kFailed;
    const int64_t now = now_ns();
    if (now - looked < kSliceNs) continue;
    silent += std::min(now - std::exchange(looked, now), kMostOfALook);
    if (patience == Patience::kTimeout) beat();  // this rank is not the one that keeps the others waiting
    const uint32_t last = std::exchange(beats, head_->lines[rank].beats.load(std::memory_order_relaxed));
    if (last != beats) silent = 0;
    if (!is_here(rank) && !came()) {
      fail(rank_word(rank) + " has ended; " + rank_word(this->rank()) + " waited for it at " + where(name));
    } else if (patience == Patience::kForEver) {
      if ((*interrupted)()) return Waited::kInterrupted;
    } else if (const double seconds = 1e-9 * static_cast<double>(silent); seconds > timeout_) {
      fail(rank_word(rank) + " did not come to " + where(name) + ": " + rank_word(this->rank()) + " waited " +
           std::to_string(static_cast<int64_t>(seconds)) + " s");
    }
  }
}

std::string Window::where(const char* name) const { return std::string(name) + " of step " + std::to_string(step_); }

bool Window::is_here(int rank) const {
  struct flock lock = byte_lock(rank);
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Window::require_all() {
  if (failed()) throw RankError(failure());
  for (int other = 0; other < count(); ++other)
    if (other != rank() && !is_here(other)) throw RankError(rank_word(other) + " has ended");
}

void Window::fail(const std::string& words) {
  uint32_t none = 0;
  if (!head_->failed.compare_exchange_strong(none, 1)) return;
  const size_t length = std::min(words.size(), kMostWords - 1);
  std::memcpy(head_->words, words.data(), length);
  head_->words[length] = '\0';
  head_->failed.store(2);
  for (int rank = 0; rank < count(); ++rank)
    for (Word* word : {&head_->lines[rank].arrived, &head_->lines[rank].sent, &head_->lines[rank].taken})
      wake_sleepers(word->value);
  wake_sleepers(head_->announced.value);
}

bool Window::failed() const { return head_->failed.load(std::memory_order_acquire) != 0; }

std::string Window::failure() const {
  const int64_t end = now_ns() + kSliceNs;  // who writes the words may end before they are there
  while (head_->failed.load(std::memory_order_acquire) == 1 && now_ns() < end) _mm_pause();
  return head_->failed.load(std::memory_order_acquire) == 2 ? head_->words : "a rank has failed";
}

}  // namespace ingot
