// A libnccl.so.2 without GPUs: what ingot calls, between real processes of one machine, on the emulated driver's queue.
//
// Ranks share memory without a name, in which each has a box for every other one. What a rank sends waits there until
// the other takes it. Work that waits for another rank is not ready, and the queue of the driver stops there, as the
// kernels of NCCL spin on a GPU. A rank that is lost leaves the others waiting, until they abort.
//
// It is stricter than NCCL: numbers that do not fit together, operations in another order and memory outside of
// allocations are errors.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

enum { kSuccess = 0, kCudaError = 1, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5 };
enum { kDone = 0, kNotReady = 600, kLaunchFailed = 719 };  // of the driver's work
constexpr int kFloat = 7, kMostRanks = 8, kIdBytes = 128;
constexpr size_t kBoxBytes = size_t{4} << 20;

enum class Kind : int { kGather, kSingle };

struct Box {
  std::atomic<uint32_t> full;
  Kind kind;
  uint64_t count, number;
  unsigned char data[kBoxBytes];
};
struct Shared {
  std::atomic<int> count, arrived;
  std::atomic<int> joined[kMostRanks];
  int devices[kMostRanks];
  Box boxes[kMostRanks][kMostRanks];  // [from][to]
};

struct Communicator {
  Shared* shared;
  int rank, count;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{kSuccess};
  uint64_t gathers = 0;       // that have run
  std::atomic<int> calls{0};  // that the queue and graphs hold
};

// Counts a call for as long as anything holds it.
class Holder {
 public:
  explicit Holder(Communicator* group) : group_(group) { group_->calls += 1; }
  Holder(const Holder& other) : Holder(other.group_) {}
  Holder& operator=(const Holder&) = delete;
  ~Holder() { group_->calls -= 1; }
  Communicator* operator->() const { return group_; }

 private:
  Communicator* group_;
};

struct Part {
  bool sends;
  int peer;
  unsigned char* at;
  uint64_t count;
  bool done = false;
};

int held = 0, version = 22807;
std::map<std::string, int> made_ids;  // path → file, until all have it
int groups = 0;                       // open
std::vector<std::pair<Communicator*, Part>> grouped;

template <class T>
T driver(const char* name) {
  return reinterpret_cast<T>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

// One operation of a rank: a state that the driver's queue runs again until it is done.
struct Operation {
  Holder group;
  Kind kind;
  std::vector<Part> parts;
  bool begun = false;

  int wrong(const char* what, const Part& part, uint64_t theirs) {
    std::fprintf(stderr, "emulated NCCL: rank %d %s rank %d: %llu here, %llu there\n", group->rank, what, part.peer,
                 static_cast<unsigned long long>(part.count), static_cast<unsigned long long>(theirs));
    group->error = kInvalidUsage;
    return kLaunchFailed;
  }
  int operator()() {
    if (group->aborted) return kDone;  // kernels end early, and what they had to write is not there
    if (!std::exchange(begun, true)) group->gathers += kind == Kind::kGather;
    bool blocked[2][kMostRanks] = {}, all = true;
    for (Part& part : parts) {
      if (part.done) continue;
      bool& waits = blocked[part.sends][part.peer];
      Box& box =
          part.sends ? group->shared->boxes[group->rank][part.peer] : group->shared->boxes[part.peer][group->rank];
      const size_t bytes = part.count * sizeof(float);
      if (waits || (box.full.load(std::memory_order_acquire) != 0) == part.sends) {
        waits = true, all = false;
        continue;
      }
      if (part.sends) {
        std::memcpy(box.data, part.at, bytes);
        box.kind = kind, box.count = part.count, box.number = group->gathers;
      } else {
        if (box.kind != kind) return wrong("does not do the same as", part, box.count);
        if (box.count != part.count) return wrong("expects another number of numbers than", part, box.count);
        if (kind == Kind::kGather && box.number != group->gathers) return wrong("is at another step", part, box.number);
        std::memcpy(part.at, box.data, bytes);
      }
      box.full.store(part.sends, std::memory_order_release);
      part.done = true;
    }
    return all ? kDone : kNotReady;
  }
};

int enqueue(Communicator* group, Kind kind, std::vector<Part> parts, void* stream) {
  static const auto inside = driver<bool (*)(uintptr_t, size_t)>("emulated_inside");
  static const auto put = driver<void (*)(std::function<int()>)>("emulated_enqueue");
  if (group == nullptr || group->aborted || (stream == nullptr && groups == 0)) return kInvalidArgument;
  for (const Part& part : parts) {
    if (part.peer < 0 || part.peer >= group->count || part.count * sizeof(float) > kBoxBytes) return kInvalidArgument;
    if (part.count && !inside(reinterpret_cast<uintptr_t>(part.at), part.count * sizeof(float))) return kCudaError;
  }
  if (groups > 0) {
    if (kind != Kind::kSingle) return kInvalidUsage;  // ingot groups sends and receives alone
    for (const Part& part : parts) grouped.emplace_back(group, part);
    return kSuccess;
  }
  put(Operation{Holder(group), kind, std::move(parts)});
  return kSuccess;
}

}  // namespace

extern "C" {

struct Id {
  char path[kIdBytes];
};

void emulated_nccl_set_version(int number) { version = number; }
int emulated_nccl_held() { return held; }

int ncclGetVersion(int* to) {
  *to = version;
  return kSuccess;
}
const char* ncclGetErrorString(int status) {
  return status == kInvalidUsage      ? "invalid usage"
         : status == kInvalidArgument ? "invalid argument"
         : status == kCudaError       ? "unhandled cuda error"
                                      : "unhandled system error";
}
int ncclGetUniqueId(Id* to) {
  const int file = memfd_create("emulated nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  std::memset(to, 0, sizeof *to);
  std::snprintf(to->path, sizeof to->path, "/proc/%d/fd/%d", getpid(), file);
  made_ids[to->path] = file;
  return kSuccess;
}
int ncclCommInitRank(Communicator** to, int count, Id id, int rank) {
  static const auto device = driver<int (*)()>("emulated_device");
  *to = nullptr;
  if (count < 1 || count > kMostRanks || rank < 0 || rank >= count) return kInvalidArgument;
  if (device() < 0) return kCudaError;
  const int file = open(id.path, O_RDWR | O_CLOEXEC);
  if (file < 0) return kSystemError;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto* shared = static_cast<Shared*>(memory);
  int none = 0;
  if (!shared->count.compare_exchange_strong(none, count) && none != count) return kInvalidArgument;
  if (shared->joined[rank].exchange(1) != 0) return kInvalidUsage;
  shared->devices[rank] = device();
  shared->arrived += 1;
  while (shared->arrived < count) usleep(200);
  if (const auto own = made_ids.find(id.path); own != made_ids.end()) {
    close(own->second);
    made_ids.erase(own);
  }
  for (int one = 0; one < count; ++one)
    for (int other = 0; other < one; ++other)
      if (shared->devices[one] == shared->devices[other]) return kInvalidUsage;
  *to = new Communicator{shared, rank, count};
  held += 1;
  return kSuccess;
}
// Like NCCL's, it returns when the last graph is gone that holds a call.
int ncclCommAbort(Communicator* group) {
  if (group == nullptr || group->aborted.exchange(true)) return kInvalidArgument;
  while (group->calls > 0) usleep(200);
  held -= 1;
  return kSuccess;
}
int ncclCommDestroy(Communicator* group) { return ncclCommAbort(group); }
int ncclCommGetAsyncError(Communicator* group, int* error) {
  *error = group->error;
  return kSuccess;
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* group, void* stream) {
  if (type != kFloat || group == nullptr) return kInvalidArgument;
  std::vector<Part> parts;
  for (int peer = 0; peer < group->count; ++peer) {
    auto* source = const_cast<unsigned char*>(static_cast<const unsigned char*>(from));
    parts.push_back({true, peer, source, count});
    parts.push_back(
        {false, peer, static_cast<unsigned char*>(to) + count * sizeof(float) * static_cast<size_t>(peer), count});
  }
  return enqueue(group, Kind::kGather, std::move(parts), stream);
}
int ncclSend(const void* from, size_t count, int type, int peer, Communicator* group, void* stream) {
  if (type != kFloat) return kInvalidArgument;
  auto* source = const_cast<unsigned char*>(static_cast<const unsigned char*>(from));
  return enqueue(group, Kind::kSingle, {{true, peer, source, count}}, stream);
}
int ncclRecv(void* to, size_t count, int type, int peer, Communicator* group, void* stream) {
  if (type != kFloat) return kInvalidArgument;
  return enqueue(group, Kind::kSingle, {{false, peer, static_cast<unsigned char*>(to), count}}, stream);
}
int ncclGroupStart() {
  groups += 1;
  return kSuccess;
}
int ncclGroupEnd() {
  if (groups < 1) return kInvalidUsage;
  if (--groups > 0 || grouped.empty()) return kSuccess;
  std::vector<Part> parts;
  Communicator* const group = grouped.front().first;
  for (auto& [each, part] : grouped) {
    if (each != group) return kInvalidUsage;
    parts.push_back(part);
  }
  grouped.clear();
  static int any;  // some stream: that of the calls inside
  return enqueue(group, Kind::kSingle, std::move(parts), &any);
}
}
