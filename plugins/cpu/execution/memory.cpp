#include "execution/memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace ingot {

Region::Region(size_t bytes, bool huge_pages) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  if (huge_pages) madvise(memory, bytes, MADV_HUGEPAGE);  // advice: a kernel without it costs speed only
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace ingot
