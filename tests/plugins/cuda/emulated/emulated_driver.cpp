// A libcuda.so.1 without a GPU: the driver calls that ingot makes, over an emulated device whose "machine code" lists
// shared libraries of host code (emulated_kernels.cpp), and the commands that compile them (nvcc.py).
//
// Work is queued and done no earlier than a synchronisation asks for, so that a missing one is noticed. Fresh memory
// holds NaN, and every allocation ends in a strip that nobody may touch.
//
// To time the host alone, kernels can be left out: a graph then takes a fixed time on a clock, and computes nothing.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialised = 3,
  kDeinitialised = 4,
  kNoDevice = 100,
  kInvalidContext = 201,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719
};

using Work = std::function<int()>;
using Launch = const char* (*)(void (*)(void**), void**, const unsigned*, unsigned, unsigned, int);

constexpr size_t kStrip = 256;
constexpr size_t kPoisoned = size_t{16} << 20;  // larger allocations are scratch of libraries
constexpr size_t kMemory = size_t{4} << 30;
constexpr unsigned kUsualShared = 48 << 10, kMostShared = 227 << 10;

struct Unit {  // a file of kernels
  std::string library, kernels, command;
  void* loaded = nullptr;
  int file = -1;
  Launch launch = nullptr;
  void (*(*find)(const char*, int*, const size_t**))(void**) = nullptr;
};
struct Module {
  std::vector<Unit> units;
};
struct Function {
  Unit* unit;
  void (*open)(void**);
  int count;
  const size_t* sizes;
  unsigned shared = kUsualShared;
  std::string name;
};
struct Graph {
  std::vector<Work> work;
};
struct Event {
  unsigned flags = 0;
  std::chrono::steady_clock::time_point when{};  // it was reached
  std::chrono::steady_clock::time_point due{};   // the graphs before it end, where kernels are left out
};
struct Mark {  // what is queued where an event is recorded
  Event* event;
  int operator()() const {
    event->when = std::chrono::steady_clock::now();
    return kSuccess;
  }
};

int given_devices() {
  const char* given = std::getenv("INGOT_EMULATED_GPUS");
  return given ? std::atoi(given) : 1;
}

int devices = given_devices(), first_device = 0;  // as this process sees them; the number of the first one
int device = -1;                                  // whose context was made last
int held = 0;                                     // allocations, streams, modules, graphs that nobody gave back
int retained = 0, contexts = 0;                   // holders of the primary context; how often it was made
size_t others = 0;                                // bytes of memory that other processes have
bool initialised = false, capturing = false;
int backwards = 0;
bool idle = false;                        // kernels are left out
std::chrono::nanoseconds graph_takes{0};  // then
std::chrono::steady_clock::time_point busy_until{};
std::vector<Work> queue, captured;
std::vector<Work> uploads;  // copies from pageable memory: on their way, no stream waits for them
std::map<uintptr_t, std::pair<size_t, void*>> allocated;  // address → bytes, what malloc gave
thread_local bool entered = false;                        // whether this thread has a context

// Does the first of what is queued, and counts it off. What that queues and waits for comes before the rest. Work that
// is not ready, because other ranks have not come, and what lies behind it stay queued.
int flush(size_t& count) {
  const auto end = queue.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<Work> work(queue.begin(), end);
  const std::vector<Work> rest(end, queue.end());
  queue.clear();
  int code = kSuccess;
  size_t done = 0;
  for (; done < work.size(); ++done) {
    if ((code = work[done]())) break;
  }
  count -= done;
  if (code && code != kNotReady) return code;
  queue.insert(queue.end(), std::make_move_iterator(work.begin() + static_cast<std::ptrdiff_t>(done)),
               std::make_move_iterator(work.end()));
  queue.insert(queue.end(), rest.begin(), rest.end());
  return code;
}

// `flush` until it is done.
int wait_for(size_t count) {
  int code;
  while ((code = flush(count)) == kNotReady) std::this_thread::sleep_for(std::chrono::microseconds(100));
  return code;
}

// Whether [address, address + bytes) lies in one allocation.
bool inside(uintptr_t address, size_t bytes) {
  auto after = allocated.upper_bound(address);
  if (after == allocated.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second.first;
}

// Whether there is a context, and what else forbids a call.
int require_context() { return !entered ? kInvalidContext : retained < 1 ? kDeinitialised : kSuccess; }

size_t free_memory() {
  size_t taken = others;
  for (const auto& each : allocated) taken += each.second.first;
  return taken < kMemory ? kMemory - taken : 0;
}

// Compiles what is not there yet. Each session has a copy of its own: sessions of several threads launch at once.
bool load(Unit& unit) {
  if (access(unit.library.c_str(), R_OK) != 0 && std::system(unit.command.c_str()) != 0) return false;
  std::ifstream from(unit.library, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(from)), std::istreambuf_iterator<char>());
  unit.file = memfd_create("kernels", 0);
  if (write(unit.file, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) return false;
  unit.loaded = dlopen(("/proc/self/fd/" + std::to_string(unit.file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!unit.loaded) {
    std::fprintf(stderr, "emulated GPU: %s\n", dlerror());
    return false;
  }
  unit.launch = reinterpret_cast<Launch>(dlsym(unit.loaded, "emulated_launch"));
  unit.find = reinterpret_cast<decltype(unit.find)>(dlsym(unit.loaded, "emulated_find"));
  return unit.launch && unit.find;
}

}  // namespace

extern "C" {

// For tests and for the emulated cuBLASLt.
void emulated_set_devices(int count) { devices = count; }
void emulated_set_first_device(int number) { first_device = number; }
int emulated_device() { return entered ? first_device + device : -1; }
void emulated_run_backwards(int yes) { backwards = yes; }
void emulated_leave_out_kernels(int yes, int64_t graph_nanoseconds) {
  idle = yes, graph_takes = std::chrono::nanoseconds(graph_nanoseconds);
}
int emulated_held() { return held; }
int emulated_retained() { return retained; }
int emulated_contexts() { return contexts; }
void emulated_let_others_take(size_t bytes) { others = bytes; }
size_t emulated_taken() { return kMemory - others - free_memory(); }
bool emulated_capturing() { return capturing; }
bool emulated_inside(uintptr_t address, size_t bytes) { return inside(address, bytes); }
void emulated_enqueue(Work work) { (capturing ? captured : queue).push_back(std::move(work)); }
void emulated_enqueue_call(int (*call)(int), int number) {
  emulated_enqueue([=] { return call(number); });
}

int cuInit(unsigned) {
  initialised = true;
  return devices ? kSuccess : kNoDevice;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  *count = devices;
  return initialised ? kSuccess : kNotInitialised;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < devices ? kSuccess : kInvalidValue;
}
int cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<size_t>(length), "Emulated GPU");
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* sm = std::getenv("INGOT_EMULATED_SM");
  const int capability = sm ? std::atoi(sm) : 90;
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? 4 : 0;
  return kSuccess;
}
int cuDeviceGetUuid(unsigned char* uuid, int ordinal) {
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<unsigned char>(1 + first_device + ordinal);
  return kSuccess;
}
int cuDeviceTotalMem(size_t* bytes, int) {
  *bytes = kMemory;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int ordinal) {
  *context = &devices;
  device = ordinal;
  contexts += retained++ == 0;
  return kSuccess;
}
int cuDevicePrimaryCtxRelease(int) { return retained-- > 0 ? kSuccess : kInvalidContext; }
int cuCtxSetCurrent(void* context) {
  entered = context != nullptr;
  return kSuccess;
}
int cuCtxSynchronize() {
  const int code = require_context();
  if (code || capturing) return code ? code : kInvalidValue;
  for (const Work& copy : uploads) copy();
  uploads.clear();
  return wait_for(queue.size());
}
int cuMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = free_memory(), *total = kMemory;
  return require_context();
}
int cuMemAlloc(uintptr_t* address, size_t bytes) {
  if (const int code = require_context()) return code;
  if (bytes > free_memory()) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 2 * kStrip + 255) / 256 * 256);
  if (!memory) return kOutOfMemory;
  if (bytes <= kPoisoned) std::memset(memory, 0xff, bytes);
  std::memset(static_cast<unsigned char*>(memory) + bytes, 0xa5, kStrip);
  *address = reinterpret_cast<uintptr_t>(memory);
  allocated[*address] = {bytes, memory};
  held += 1;
  return kSuccess;
}
int cuMemFree(uintptr_t address) {
  auto found = allocated.find(address);
  if (found == allocated.end()) return kInvalidValue;
  const auto* strip = reinterpret_cast<unsigned char*>(address + found->second.first);
  bool whole = true;
  for (size_t i = 0; i < kStrip; ++i) whole &= strip[i] == 0xa5;
  if (!whole) std::fprintf(stderr, "emulated GPU: a write behind an allocation of %zu bytes\n", found->second.first);
  std::free(found->second.second);
  allocated.erase(found);
  held -= 1;
  return whole ? kSuccess : kIllegalAddress;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  if (const int code = require_context()) return code;
  *address = std::malloc(bytes);
  held += 1;
  return kSuccess;
}
int cuMemFreeHost(void* address) {
  std::free(address);
  held -= 1;
  return kSuccess;
}
int cuMemcpyHtoD(uintptr_t to, const void* from, size_t bytes) {
  if (!inside(to, bytes)) return kIllegalAddress;
  const auto* begin = static_cast<const unsigned char*>(from);
  uploads.push_back([to, copy = std::vector<unsigned char>(begin, begin + bytes)] {
    std::memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
    return kSuccess;
  });
  return require_context();
}
int cuMemcpyHtoDAsync(uintptr_t to, const void* from, size_t bytes, void*) {
  if (!inside(to, bytes)) return kIllegalAddress;
  emulated_enqueue([=] {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return kSuccess;
  });
  return require_context();
}
int cuMemcpyDtoHAsync(void* to, uintptr_t from, size_t bytes, void*) {
  if (!inside(from, bytes)) return kIllegalAddress;
  emulated_enqueue([=] {
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return kSuccess;
  });
  return require_context();
}
int cuMemcpyDtoDAsync(uintptr_t to, uintptr_t from, size_t bytes, void*) {
  if (!inside(to, bytes) || !inside(from, bytes)) return kIllegalAddress;
  emulated_enqueue([=] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return kSuccess;
  });
  return require_context();
}
int cuStreamCreate(void** stream, unsigned) {
  if (const int code = require_context()) return code;
  *stream = &queue;
  held += 1;
  return kSuccess;
}
int cuStreamDestroy(void*) {
  held -= 1;
  return kSuccess;
}
int cuEventCreate(void** event, unsigned flags) {
  if (const int code = require_context()) return code;
  *event = new Event{flags};
  held += 1;
  return kSuccess;
}
int cuEventDestroy(void* event) {
  held -= 1;
  delete static_cast<Event*>(event);
  return kSuccess;
}
int cuEventRecord(void* event, void*) {
  static_cast<Event*>(event)->due = busy_until;
  emulated_enqueue(Mark{static_cast<Event*>(event)});
  return require_context();
}
int cuEventSynchronize(void* event) {  // what was queued behind it waits on
  for (size_t i = 0; i < queue.size(); ++i) {
    const Mark* mark = queue[i].target<Mark>();
    if (mark && mark->event == event) {
      std::this_thread::sleep_until(mark->event->due);
      return wait_for(i + 1);
    }
  }
  return kSuccess;
}
int cuEventQuery(void* event) {
  for (size_t i = 0; i < queue.size(); ++i) {
    const Mark* mark = queue[i].target<Mark>();
    if (mark && mark->event == event) {
      if (std::chrono::steady_clock::now() < mark->event->due) return kNotReady;
      size_t count = i + 1;
      return flush(count);
    }
  }
  return kSuccess;
}
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  const auto *first = static_cast<Event*>(begin), *last = static_cast<Event*>(end);
  constexpr unsigned kNoTimes = 2;                          // CU_EVENT_DISABLE_TIMING
  if ((first->flags | last->flags) & kNoTimes) return 400;  // CUDA_ERROR_INVALID_HANDLE
  *milliseconds = std::chrono::duration<float, std::milli>(last->when - first->when).count();
  return kSuccess;
}
int cuStreamSynchronize(void*) { return capturing ? kInvalidValue : wait_for(queue.size()); }
int cuStreamQuery(void*) {
  size_t count = queue.size();
  return capturing ? kInvalidValue : flush(count);
}
int cuStreamBeginCapture(void*, int) {
  if (capturing) return kInvalidValue;
  capturing = true;
  return kSuccess;
}
int cuStreamEndCapture(void*, void** graph) {
  if (!capturing) return kInvalidValue;
  capturing = false;
  *graph = new Graph{std::move(captured)};
  captured.clear();
  held += 1;
  return kSuccess;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  held += 1;
  return kSuccess;
}
int cuGraphDestroy(void* graph) {
  held -= 1;
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
int cuGraphExecDestroy(void* executable) {
  held -= 1;
  delete static_cast<Graph*>(executable);
  return kSuccess;
}
int cuGraphLaunch(void* executable, void*) {
  busy_until = std::max(busy_until, std::chrono::steady_clock::now()) + graph_takes;
  for (const Work& each : static_cast<Graph*>(executable)->work) queue.push_back(each);
  return require_context();
}
int cuModuleLoadData(void** handle, const void* image) {
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
  std::istringstream lines(static_cast<const char*>(image) + sizeof(Elf64_Ehdr));
  auto* module = new Module;
  for (Unit unit; std::getline(lines, unit.library, '\t') && std::getline(lines, unit.kernels, '\t') &&
                  std::getline(lines, unit.command);) {
    module->units.push_back(unit);
  }
  *handle = module;
  held += 1;
  return module->units.empty() ? 200 : kSuccess;
}
int cuModuleUnload(void* handle) {
  auto* module = static_cast<Module*>(handle);
  held -= 1;
  for (const Unit& unit : module->units) {
    if (unit.loaded) dlclose(unit.loaded);
    if (unit.file >= 0) close(unit.file);
  }
  delete module;
  return kSuccess;
}
int cuModuleGetFunction(void** handle, void* module, const char* name) {
  for (Unit& unit : static_cast<Module*>(module)->units) {
    std::istringstream kernels(unit.kernels);
    for (std::string begin; kernels >> begin;) {
      if (std::strncmp(name, begin.c_str(), begin.size()) != 0) continue;
      if (!unit.loaded && !load(unit)) return kNotFound;
      auto* function = new Function{&unit, nullptr, 0, nullptr, kUsualShared, name};
      function->open = unit.find(name, &function->count, &function->sizes);
      *handle = function;
      return function->open ? kSuccess : kNotFound;
    }
  }
  return kNotFound;
}
int cuFuncSetAttribute(void* handle, int attribute, int value) {
  if (attribute != 8 || static_cast<unsigned>(value) > kMostShared) return kInvalidValue;
  auto* function = static_cast<Function*>(handle);
  if (static_cast<unsigned>(value) > function->shared) function->shared = static_cast<unsigned>(value);
  return kSuccess;
}
int cuLaunchKernel(void* handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared, void*, void** arguments, void**) {
  if (const int code = require_context()) return code;
  const auto* function = static_cast<Function*>(handle);
  if (!x || !y || !z || y > 65535 || z > 65535 || threads > 1024 || shared > function->shared) return kInvalidValue;
  if (idle) return kSuccess;
  std::vector<std::vector<unsigned char>> values;  // the driver copies them before it returns
  for (int i = 0; i < function->count; ++i) {
    const auto* begin = static_cast<const unsigned char*>(arguments[i]);
    values.emplace_back(begin, begin + function->sizes[i]);
  }
  emulated_enqueue([=]() mutable {
    std::vector<void*> pointers;
    for (auto& value : values) pointers.push_back(value.data());
    const unsigned grid[] = {x, y, z};
    const char* wrong = function->unit->launch(function->open, pointers.data(), grid, threads, shared, backwards);
    if (wrong) std::fprintf(stderr, "emulated GPU: %s: %s\n", function->name.c_str(), wrong);
    return wrong ? kLaunchFailed : kSuccess;
  });
  return kSuccess;
}
// The fields of CUlaunchConfig. Here every kernel waits for the one before it, whatever the attributes allow.
struct LaunchConfig {
  unsigned x, y, z, threads, threads_y, threads_z, shared;
  void* stream;
  void* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const LaunchConfig* config, void* handle, void** arguments, void** extra) {
  return cuLaunchKernel(handle, config->x, config->y, config->z, config->threads, config->threads_y, config->threads_z,
                        config->shared, config->stream, arguments, extra);
}
int cuGetErrorName(int, const char** name) {
  *name = "EMULATED_ERROR";
  return kSuccess;
}
int cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }

// How the bindings find everything else. Names come without the suffix of their version.
int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t, int* status) {
  *address = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
  if (status) *status = *address ? 0 : 1;
  return *address ? kSuccess : kNotFound;
}
}
