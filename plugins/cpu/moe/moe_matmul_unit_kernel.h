// Products of experts whose groups have whole numbers of units with rows that are rounded to int8, as in
// matmul_unit_kernel.h.
#pragma once

#include "matmul/matmul_unit_kernel.h"
#include "moe/moe_matmul_int8_kernel.h"

namespace ingot {
namespace {

template <typename I, typename Format>
struct UnitProductOf {
  using type = Int8Product<I, Format, UnitProducts<I, Format>>;
};
template <typename I, typename Format>
  requires(I::kRegisters >= 32)
struct UnitProductOf<I, Format> {
  using type = FewOrMany<kFewUnitRows * I::kUnitRows, Int8Product<I, Format, UnitProducts<I, Format>>,
                         Int8Product<I, Format, UnitProducts<I, Format, true>>>;
};
template <typename I, typename Format>
using UnitProduct = typename UnitProductOf<I, Format>::type;

}  // namespace
}  // namespace ingot
