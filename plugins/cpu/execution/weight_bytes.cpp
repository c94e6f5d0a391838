#include "execution/weight_bytes.h"

#include <algorithm>
#include <iterator>

#include "execution/plan_check.h"

namespace ingot {
namespace {

struct PlainType {
  std::string_view dtype;
  int64_t itemsize;
  int64_t k_block = 1;  // columns of a packed row are filled up to a multiple of it
};

constexpr PlainType kTypes[] = {{"f32", 4},  {"bf16", 2, 32}, {"f16", 2}, {"i32", 4},
                                {"int8", 1}, {"bool", 1},     {"i64", 8}, {kCompressed.dtype, 1}};

const PlainType* find_type(std::string_view dtype) {
  const auto* const found = std::ranges::find(kTypes, dtype, &PlainType::dtype);
  return found == std::end(kTypes) ? nullptr : found;
}

const WeightFormat* find_format(std::string_view dtype) {
  const auto* const found = std::ranges::find(kWeightFormats, dtype, &WeightFormat::dtype);
  return found == std::end(kWeightFormats) ? nullptr : found;
}

}  // namespace

int64_t itemsize_of(std::string_view dtype) {
  if (find_format(dtype) != nullptr) return 1;
  const PlainType* const found = find_type(dtype);
  return found == nullptr ? 0 : found->itemsize;
}

int64_t row_bytes_of(std::string_view dtype, int64_t k) {
  return dtype == kTableFormat.dtype ? int64_t{sizeof(float)} + round_up(k, 4) : k * itemsize_of(dtype);
}

std::string row_layout_of(std::string_view dtype) {
  return dtype == kTableFormat.dtype ? std::string("row.").append(dtype) : "row";
}

bool comes_in_groups(std::string_view dtype, int64_t group) {
  const WeightFormat* const format = find_format(dtype);
  if (format == nullptr) return group == 0;
  if (group == 0) return format->rows_alone || format->groups[0] == 0;
  return std::ranges::count(format->groups, group) > 0;
}

int64_t panel_bytes_of(std::string_view dtype, int64_t k, int64_t group) {
  const WeightFormat* const format = find_format(dtype);
  if (dtype == kCompressed.dtype) return kCompressed.panel_bytes(k);
  if (format == nullptr) {
    const PlainType* const type = find_type(dtype);
    return type == nullptr ? 0 : kPanel * type->itemsize * round_up(k, type->k_block);
  }
  const int64_t padded_k = round_up(k, format->k_block);
  const int64_t units = round_up(padded_k, kUnitK) / kUnitK * format->unit_bytes;
  const int64_t row = group == 0 ? 0 : round_up(padded_k, group) / group * format->group_bytes + units;
  const int64_t groups = round_up(row * kPanel, kAlignment);
  return kHeaderBytes + groups + padded_k * format->bits / 8 * kPanel;
}

std::string panel_layout_of(std::string_view dtype, int64_t group) {
  const std::string layout = std::string("panel16.").append(dtype);
  return group == 0 ? layout : layout + "g" + std::to_string(group);
}

int64_t num_panels_of(int64_t n, bool gated) {
  return gated ? 2 * round_up(n / 2, kPanel) / kPanel : round_up(n, kPanel) / kPanel;
}

}  // namespace ingot
