// How many bytes weights take, and what their layouts are called, as in plugins/layouts.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "matmul/weight_formats.h"

namespace ingot {

// 1 of a quantised type, which is counted by row and panel; 0 where there is no such type.
int64_t itemsize_of(std::string_view dtype);

int64_t row_bytes_of(std::string_view dtype, int64_t k);
std::string row_layout_of(std::string_view dtype);

bool comes_in_groups(std::string_view dtype, int64_t group);  // 0 for weights without groups
int64_t panel_bytes_of(std::string_view dtype, int64_t k, int64_t group);
std::string panel_layout_of(std::string_view dtype, int64_t group);
int64_t num_panels_of(int64_t n, bool gated);  // that n rows of a weight take, gated ones as pairs

}  // namespace ingot
