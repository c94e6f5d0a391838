// See access_check.h.
#include "access_check.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <vector>

#include "emulated_device.h"

#ifdef EMULATED_CHECKED
namespace emulated {
namespace {

// What was done to a byte since the last barrier: `round` says since which.
struct Byte {
  uint32_t round = 0;
  uint32_t readers = 0;                          // warps
  int16_t reader = -1, writer = -1;              // the last threads
  uint32_t read_meeting = 0, write_meeting = 0;  // of their warps, when they did
  bool atomic = false;                           // so the last write was
};

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
};

Range image, shared, statics;  // statics: the writable part of the image, which holds static shared memory
std::vector<Byte> bytes_of_shared, bytes_of_statics;
std::vector<uint32_t> meetings;  // of each warp
uint32_t round_number = 0;
bool running = false;

int find_image(dl_phdr_info* info, size_t, void*) {
  const auto own = reinterpret_cast<uintptr_t>(&find_image);
  Range whole{UINTPTR_MAX, 0}, writable;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    const Range range{info->dlpi_addr + part.p_vaddr, info->dlpi_addr + part.p_vaddr + part.p_memsz};
    whole = {range.begin < whole.begin ? range.begin : whole.begin, range.end > whole.end ? range.end : whole.end};
    if (part.p_flags & PF_W) writable = range;
  }
  if (!whole.holds(own, 1)) return 0;
  image = whole, statics = writable;
  return 1;
}

void check_byte(Byte& byte, Access how) {
  const auto thread = static_cast<int16_t>(thread_index().x);
  const auto warp = static_cast<uint32_t>(thread) / 32;
  if (byte.round != round_number) byte = Byte{}, byte.round = round_number;
  const bool writes = how != Access::kRead, both_atomic = how == Access::kAtomic && byte.atomic;
  const auto unordered = [&](int16_t other, uint32_t meeting) {
    return other >= 0 && other != thread && (static_cast<uint32_t>(other) / 32 != warp || meeting == meetings[warp]);
  };
  const bool after_write = !both_atomic && unordered(byte.writer, byte.write_meeting);
  const bool after_read = writes && (byte.readers & ~(1u << warp) || unordered(byte.reader, byte.read_meeting));
  if (after_write || after_read) {
    fail("a race: two threads use a byte of shared memory, one of them writes, and nothing lies between them");
  }
  if (writes) {
    byte.writer = thread, byte.write_meeting = meetings[warp], byte.atomic = how == Access::kAtomic;
  } else {
    byte.reader = thread, byte.read_meeting = meetings[warp], byte.readers |= 1u << warp;
  }
}

void check_range(const Range& range, std::vector<Byte>& of, uintptr_t address, size_t bytes, Access how) {
  for (size_t i = 0; i < bytes; ++i) check_byte(of[address - range.begin + i], how);
}

}  // namespace

void check_access(const void* place, size_t bytes, Access how) {
  if (!running) return;
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (shared.holds(address, bytes)) {
    check_range(shared, bytes_of_shared, address, bytes, how);
  } else if (statics.holds(address, bytes)) {
    check_range(statics, bytes_of_statics, address, bytes, how);
  } else if (!image.holds(address, bytes) && !is_own(address, bytes)) {
    using Inside = bool (*)(uintptr_t, size_t);
    static const auto inside =
        reinterpret_cast<Inside>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "emulated_inside"));
    if (!inside(address, bytes)) fail("an access to memory that is not allocated");
  }
}

void check_block(size_t threads, unsigned char* memory, size_t bytes) {
  if (image.end == 0) dl_iterate_phdr(&find_image, nullptr);
  shared = {reinterpret_cast<uintptr_t>(memory), reinterpret_cast<uintptr_t>(memory) + bytes};
  bytes_of_shared.resize(bytes), bytes_of_statics.resize(statics.end - statics.begin);
  meetings.assign(threads / 32, 0);
  round_number += 1;
  running = true;
}
void check_barrier() { round_number += 1; }
void check_warp(size_t warp) { meetings[warp] += 1; }
void check_stop() { running = false; }

}  // namespace emulated

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(name, bytes)                                                                              \
  void __tsan_read##name(void* place) { emulated::check_access(place, bytes, emulated::Access::kRead); } \
  void __tsan_write##name(void* place) { emulated::check_access(place, bytes, emulated::Access::kWrite); }
ACCESS(1, 1)
ACCESS(2, 2)
ACCESS(4, 4)
ACCESS(8, 8)
ACCESS(16, 16)
#define UNALIGNED(bytes)                                                                                      \
  void __tsan_unaligned_read##bytes(void*) { emulated::fail("an access that does not lie on its own size"); } \
  void __tsan_unaligned_write##bytes(void*) { emulated::fail("an access that does not lie on its own size"); }
UNALIGNED(2)
UNALIGNED(4)
UNALIGNED(8)
UNALIGNED(16)
void __tsan_read_range(void* place, unsigned long bytes) {
  emulated::check_access(place, bytes, emulated::Access::kRead);
}
void __tsan_write_range(void* place, unsigned long bytes) {
  emulated::check_access(place, bytes, emulated::Access::kWrite);
}
}
#endif
