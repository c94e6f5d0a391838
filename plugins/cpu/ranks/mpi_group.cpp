#include "ranks/mpi_group.h"

#include <sched.h>
#include <x86intrin.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <thread>

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPolls = 2000, kYields = 2000;  // of a wait, before it sleeps between two looks
constexpr std::chrono::microseconds kShort{50}, kIdle{500};
constexpr std::chrono::milliseconds kAsk{100};
constexpr int64_t kNoMore = -1;
constexpr int kMoveTag = 1 << 14;  // beyond those of a step's messages, and at most what every MPI has
constexpr const char* kMove = "the copy of a KV block";
constexpr size_t kStatusBytes = 256;  // of any MPI_Status

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void require(int code, const char* what) {
  if (code != 0) throw RankError(std::string(what) + " of MPI says error " + std::to_string(code));
}

}  // namespace

MpiGroup::MpiGroup(const MpiCalls& calls, int rank, int count, int64_t slot_bytes, double timeout, int stages,
                   int64_t message_bytes)
    : RankGroup(rank, count, stages),
      calls_(calls),
      slot_bytes_(static_cast<size_t>(slot_bytes)),
      message_bytes_(static_cast<size_t>(message_bytes)),
      timeout_(timeout),
      announced_(static_cast<size_t>(batches())) {
  if (slot_bytes < 0 || slot_bytes > INT_MAX || message_bytes < 0 || message_bytes > INT_MAX || !(timeout > 0))
    throw std::invalid_argument("slots and messages of ranks that MPI connects have less than 2 GiB");
  const size_t bytes = std::max<size_t>(slot_bytes_ * kSlots, 64);
  own_ = Region(bytes, false);
  all_ = Region(bytes * static_cast<size_t>(places()), false);
  messages_ = Region(std::max<size_t>(message_bytes_ * kSteps, 64), false);
}

const float* MpiGroup::of(int slot, int place) const {
  const auto at = static_cast<size_t>(slot);
  return reinterpret_cast<const float*>(all_.data() + at * slot_bytes_ * static_cast<size_t>(places()) +
                                        static_cast<size_t>(place) * brought_[at]);
}

bool MpiGroup::meet(const Team& team, const Meeting& meeting, size_t bytes) {
  if (team.index == 0 && !failed()) {
    using Call = int (*)(const void*, int, uintptr_t, void*, int, uintptr_t, uintptr_t, uintptr_t*);
    brought_[static_cast<size_t>(meeting.slot)] = bytes;
    uintptr_t request = 0;
    const int size = static_cast<int>(bytes);
    const int code = std::bit_cast<Call>(calls_.iallgather)(own(meeting.slot), size, calls_.byte,
                                                            const_cast<float*>(of(meeting.slot, 0)), size, calls_.byte,
                                                            calls_.stage_comm, &request);
    if (code != 0)
      fail("MPI_Iallgather says error " + std::to_string(code));
    else
      wait(request, meeting.name);
  }
  team.barrier();
  return !failed();
}

bool MpiGroup::send(const Team& team, const Message& message, const float* x, int64_t n) {
  const auto step = static_cast<size_t>(step_ % kSteps), index = static_cast<size_t>(message.index);
  if (team.index == 0 && !failed()) {
    sent_[step].resize(std::max(sent_[step].size(), index + 1));
    if (sent_[step][index] != 0) wait(sent_[step][index], message.name);  // of the step whose messages lay there
  }
  team.barrier();
  std::byte* const to = messages_.data() + step * message_bytes_ + message.offset;
  const Team::Range own = team.share(n);
  std::copy(x + own.begin, x + own.end, reinterpret_cast<float*>(to) + own.begin);
  team.barrier();
  if (team.index == 0 && !failed())
    isend({to, static_cast<size_t>(n) * 4}, rank() - places(), static_cast<int>(index), sent_[step][index]);
  return !failed();
}

bool MpiGroup::receive(const Team& team, const Message& message, float* y, int64_t n) {
  if (team.index == 0 && !failed()) {
    uintptr_t request = 0;
    const std::span<std::byte> to{reinterpret_cast<std::byte*>(y), static_cast<size_t>(n) * 4};
    if (irecv(to, rank() + places(), static_cast<int>(message.index), request)) wait(request, message.name);
  }
  team.barrier();
  return !failed();
}

void MpiGroup::announce(std::span<const int32_t> batch) {
  if (failed()) throw RankError(failure());
  Announced& next = announced_[static_cast<size_t>(++announced_steps_ % batches())];
  if (!wait_for(next)) throw RankError(failure());
  next.size = std::ssize(batch);
  next.batch.assign(batch.begin(), batch.end());
  broadcast(&next.size, sizeof(next.size), next.requests[0]);
  broadcast(next.batch.data(), batch.size_bytes(), next.requests[1]);
  next.under_way = true;
}

// MPI moves a batch on only while this rank calls it, which it does for messages or collectives of the step.
void MpiGroup::begin_step() {
  if (failed()) throw RankError(failure());
  ++step_;
  if (!wait_for(announced_[static_cast<size_t>(step_ % batches())])) throw RankError(failure());
}

bool MpiGroup::wait_for(Announced& announced) {
  if (!announced.under_way) return true;
  announced.under_way = false;
  return std::ranges::all_of(announced.requests, [&](Request& each) { return wait(each, "the beginning"); });
}

NextStep MpiGroup::next_step(std::vector<int32_t>& batch, const std::function<bool()>& interrupted) {
  if (!waits_for_next_) broadcast(&batch_size_, sizeof(batch_size_), next_);
  waits_for_next_ = true;
  Clock::time_point asked = Clock::now();
  for (int looks = 0; !done(next_); ++looks) {
    if (looks < kPolls) continue;
    std::this_thread::sleep_for(looks < kPolls + kYields ? kShort : kIdle);
    if (Clock::now() - asked < kAsk) continue;
    asked = Clock::now();
    if (interrupted()) return NextStep::kInterrupted;
  }
  waits_for_next_ = false;
  if (batch_size_ == kNoMore) return NextStep::kNone;
  ++step_;
  batch.resize(static_cast<size_t>(batch_size_));
  uintptr_t request = 0;
  broadcast(batch.data(), batch.size() * sizeof(int32_t), request);
  if (!wait(request, "the beginning")) throw RankError(failure());
  return NextStep::kBegun;
}

bool MpiGroup::gather(std::span<const std::byte> own, std::span<const std::span<std::byte>> parts, int alike) {
  uintptr_t request = 0;
  if (rank() % alike != 0) return !failed();
  if (rank() > 0) return isend(own, 0, kMoveTag, request) && wait(request, kMove);
  for (int other = alike; other < count(); other += alike)
    if (!irecv(parts[static_cast<size_t>(other / alike)], other, kMoveTag, request) || !wait(request, kMove))
      return false;
  return !failed();
}

bool MpiGroup::scatter(std::span<std::byte> own, std::span<const std::span<const std::byte>> parts, int alike) {
  uintptr_t request = 0;
  if (rank() > 0) return irecv(own, 0, kMoveTag, request) && wait(request, kMove);
  for (int other = 1; other < count(); ++other)
    if (!isend(parts[static_cast<size_t>(other / alike)], other, kMoveTag, request) || !wait(request, kMove))
      return false;
  return !failed();
}

void MpiGroup::close() {
  if (rank() != 0 || failed()) return;
  for (Announced& each : announced_)
    if (!wait_for(each)) return;
  batch_size_ = kNoMore;
  uintptr_t request = 0;
  broadcast(&batch_size_, sizeof(batch_size_), request);
  wait(request, "the end");
}

void MpiGroup::broadcast(void* data, size_t bytes, uintptr_t& request) const {
  using Call = int (*)(void*, int, uintptr_t, int, uintptr_t, uintptr_t*);
  request = 0;
  const auto call = std::bit_cast<Call>(calls_.ibcast);
  require(call(data, static_cast<int>(bytes), calls_.byte, 0, calls_.comm, &request), "MPI_Ibcast");
}

bool MpiGroup::isend(std::span<const std::byte> bytes, int to, int tag, uintptr_t& request) {
  using Call = int (*)(const void*, int, uintptr_t, int, int, uintptr_t, uintptr_t*);
  const auto call = std::bit_cast<Call>(calls_.isend);
  const int code = call(bytes.data(), static_cast<int>(bytes.size()), calls_.byte, to, tag, calls_.comm, &request);
  if (code != 0) fail("MPI_Isend says error " + std::to_string(code));
  return code == 0;
}

bool MpiGroup::irecv(std::span<std::byte> bytes, int from, int tag, uintptr_t& request) {
  using Call = int (*)(void*, int, uintptr_t, int, int, uintptr_t, uintptr_t*);
  const auto call = std::bit_cast<Call>(calls_.irecv);
  const int code = call(bytes.data(), static_cast<int>(bytes.size()), calls_.byte, from, tag, calls_.comm, &request);
  if (code != 0) fail("MPI_Irecv says error " + std::to_string(code));
  return code == 0;
}

bool MpiGroup::done(uintptr_t& request) const {
  using Call = int (*)(uintptr_t*, int*, void*);
  alignas(16) std::byte status[kStatusBytes];
  int flag = 0;
  require(std::bit_cast<Call>(calls_.test)(&request, &flag, status), "MPI_Test");
  return flag != 0;
}

bool MpiGroup::wait(uintptr_t& request, const char* name) {
  const Clock::time_point begin = Clock::now();
  try {
    for (int looks = 0; !done(request); ++looks) {
      if (looks < kPolls) {
        _mm_pause();
      } else if (looks < kPolls + kYields) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(kShort);
        if (seconds_since(begin) < timeout_) continue;
        fail("a rank did not come to " + std::string(name) + " of step " + std::to_string(step_) + ": rank " +
             std::to_string(rank()) + " waited " + std::to_string(static_cast<int64_t>(seconds_since(begin))) + " s");
        return false;
      }
    }
  } catch (const RankError& error) {
    fail(error.what());
    return false;
  }
  return true;
}

void MpiGroup::fail(const std::string& words) {
  const std::lock_guard held(words_lock_);
  if (words_.empty()) words_ = words;
  failed_.store(true, std::memory_order_release);
}

void MpiGroup::require_all() {
  if (failed()) throw RankError(failure());
}

std::string MpiGroup::failure() const {
  const std::lock_guard held(words_lock_);
  return words_;
}

}  // namespace ingot
