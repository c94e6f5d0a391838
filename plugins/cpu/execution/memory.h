// Memory straight from the operating system: zeroed, page-aligned, committed when first touched.
#pragma once

#include <cstddef>

namespace ingot {

inline constexpr size_t kHugePage = 2u << 20;

class Region {
 public:
  Region() = default;
  Region(size_t bytes, bool huge_pages);  // throws std::bad_alloc
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ingot
