// Products of experts whose weights keep a checkpoint's codes with rows that are rounded to int8, as in
// matmul_group_kernel.h.
#pragma once

#include "matmul/matmul_group_kernel.h"
#include "moe/moe_matmul_int8_kernel.h"

namespace ingot {
namespace {

template <typename I, typename Format>
struct GroupProductOf {
  using type = Int8Product<I, Format, GroupProducts<I, Format>>;
};
template <GroupVector I, typename Format>
struct GroupProductOf<I, Format> {
  using type = FewOrMany<2 * I::kGroupRows, Int8Product<I, Format, GroupProducts<I, Format>>,
                         Int8Product<I, Format, GroupProducts<I, Format, true>>>;
};
template <typename I, typename Format>
using GroupProduct = typename GroupProductOf<I, Format>::type;

}  // namespace
}  // namespace ingot
