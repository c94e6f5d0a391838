// What kernel templates ask of a CPU. A new level of instructions offers these types in isa/levels/<level>.h and gets
// the kernels of all ops. isa/simd_emulated.h, int8_emulated.h and tile_emulated.h are each member in plain C++, with
// the same bits: read them for what a member computes.
#pragma once

#include <concepts>
#include <cstdint>

namespace ingot {

// A vector of kWidth float32 lanes. A mask has a value for each lane. Partial loads and stores touch the first n lanes'
// memory alone, and load zero into the others. bf16 is stored rounded to nearest even.
template <typename S>
concept FloatVector = requires(typename S::V v, typename S::V& sum, typename S::V& other, typename S::Mask mask,
                               const float* from, float* to, const uint16_t* from_bf16, uint16_t* to_bf16,
                               const int8_t* from_i8, int8_t* to_i8, const uint8_t* from_e4m3, uint8_t* to_e4m3,
                               const void* line, void* to_line, int64_t n, typename S::V (&columns)[S::kWidth]) {
  { S::kWidth } -> std::convertible_to<int>;
  { S::kRegisters } -> std::convertible_to<int>;  // vectors that a loop may keep
  // arithmetic; max and min give b where one is NaN
  { S::zero() } -> std::same_as<typename S::V>;
  { S::set1(0.0f) } -> std::same_as<typename S::V>;
  { S::add(v, v) } -> std::same_as<typename S::V>;
  { S::sub(v, v) } -> std::same_as<typename S::V>;
  { S::mul(v, v) } -> std::same_as<typename S::V>;
  { S::div(v, v) } -> std::same_as<typename S::V>;
  { S::fma(v, v, v) } -> std::same_as<typename S::V>;  // a * b + c, rounded once
  S::accumulate(sum, v, v);                            // sum = a * b + sum, in a register
  { S::max(v, v) } -> std::same_as<typename S::V>;
  { S::min(v, v) } -> std::same_as<typename S::V>;
  { S::sqrt(v) } -> std::same_as<typename S::V>;
  { S::abs(v) } -> std::same_as<typename S::V>;
  { S::max_abs(v, v) } -> std::same_as<typename S::V>;
  { S::add_exponent(v, v) } -> std::same_as<typename S::V>;
  // masks
  { S::less(v, v) } -> std::same_as<typename S::Mask>;
  { S::less_equal(v, v) } -> std::same_as<typename S::Mask>;
  { S::first_lanes(n) } -> std::same_as<typename S::Mask>;
  { S::select(mask, v, v) } -> std::same_as<typename S::V>;
  // across lanes, in the order that simd_emulated.h says
  { S::reduce_add(v) } -> std::same_as<float>;
  { S::reduce_max(v) } -> std::same_as<float>;
  // float32 in memory
  { S::load(from) } -> std::same_as<typename S::V>;
  { S::load_partial(from, n) } -> std::same_as<typename S::V>;
  S::store(to, v);
  S::store_partial(to, v, n);
  S::load_columns(from, n, columns);
  // bf16, int8 and FP8 in memory
  { S::load_bf16(from_bf16) } -> std::same_as<typename S::V>;
  { S::load_bf16_partial(from_bf16, n) } -> std::same_as<typename S::V>;
  { S::load_bf16_even(from_bf16) } -> std::same_as<typename S::V>;
  { S::load_bf16_odd(from_bf16) } -> std::same_as<typename S::V>;
  S::load_bf16_pairs(line, sum, other);
  S::store_bf16(to_bf16, v);
  S::store_bf16_partial(to_bf16, v, n);
  S::store_bf16_pairs(to_line, v, v);
  { S::load_i8(from_i8) } -> std::same_as<typename S::V>;
  S::store_i8(to_i8, v);
  { S::load_e4m3(from_e4m3) } -> std::same_as<typename S::V>;
  S::store_e4m3(to_e4m3, v);
  // hints
  S::prefetch(line);
  S::prefetch_far(line);
  S::prefetch_stream(line);
  S::prefetch_reading(line);
  { S::kReadingRows } -> std::convertible_to<int>;  // products of so many rows take the hint for reading
};

// Sums of products of int8, and of codes of four bits with int8. `Sum` holds a line of int32 sums, `Short` those of at
// most kLongestRun k.
template <typename S>
concept Int8Vector =
    FloatVector<S> && requires(typename S::Sum& sum, typename S::Weights weights, typename S::Short& run,
                               const int8_t* x, int8_t* to_i8, const int32_t* from, int32_t* to, const void* line,
                               void* to_line, typename S::V v, const uint16_t* from_f16, int16_t (&sums_of_eight)[8]) {
      { S::multipliers(x) } -> std::same_as<typename S::Multipliers>;
      S::prefetch_codes(line);
      S::unpack(line, S::multipliers(x), S::multipliers(x), to_line, to_line);
      { S::load_int(from) } -> std::same_as<typename S::V>;
      { S::load_i8_partial(x, 1) } -> std::same_as<typename S::V>;
      { S::start_sum(from) } -> std::same_as<typename S::Sum>;
      { S::load_sum(from) } -> std::same_as<typename S::Sum>;
      S::store_sum(to, sum);
      { S::load_weights(line) } -> std::same_as<typename S::Weights>;
      { S::load_codes(line, true) } -> std::same_as<typename S::Short>;
      { S::short_multipliers(x) } -> std::same_as<typename S::Short>;
      S::add_short(run, run, run);  // the first gains the second times multipliers
      { S::load_short(from) } -> std::same_as<typename S::Short>;
      S::store_short(to, run);
      { S::kLongestRun } -> std::convertible_to<int64_t>;
      { S::template kMaxCodeRows<32> } -> std::convertible_to<int64_t>;  // products of more rows unpack int4 first
      { S::kCodePanels } -> std::convertible_to<int>;
      { S::kCodeRows } -> std::convertible_to<int>;
      { S::kLeavesCodes } -> std::convertible_to<bool>;  // see CodeProducts; if true, there is also dots
      { S::kFlipX } -> std::convertible_to<uint32_t>;  // what x is xored with, where the CPU multiplies unsigned bytes
      { S::kByteRows } -> std::convertible_to<int>;
      { S::kBytePanels } -> std::convertible_to<int>;
      // codes that stand for the 16 values of a table
      { S::table(x) } -> std::same_as<typename S::Table>;
      { S::product_table(x) } -> std::same_as<typename S::Table>;
      { S::template look_up<4, 1>(line, S::table(x)) } -> std::same_as<typename S::Weights>;
      { S::load_values(line) } -> std::same_as<typename S::Weights>;  // bytes that are values
      S::store_weights(to_line, weights);
      // codes that are numbers, whose scales are whole numbers (`UnitProducts`)
      { S::kUnitRows } -> std::convertible_to<int>;
      { S::kMultiplies32 } -> std::convertible_to<bool>;  // whether add_short may be as quick as add_codes
      { S::template line_codes<6, 0>(line) } -> std::same_as<typename S::Short>;
      { S::template unit_scales<4>(x) } -> std::same_as<typename S::Short>;
      { S::pairs(x) } -> std::same_as<typename S::Short>;
      S::sum_eights(x, sums_of_eight);
      S::template add_codes<6, 0>(run, run, run, run, run, run, run, from);
      S::add_pairs(run, run, run);
      { S::short_floats(run) } -> std::same_as<typename S::V>;
      { S::set_sum(0) } -> std::same_as<typename S::Sum>;
      { S::template sum_floats<0>(sum) } -> std::same_as<typename S::V>;
      { S::load_f16(from_f16) } -> std::same_as<typename S::V>;
      { S::load_f8(x, true) } -> std::same_as<typename S::V>;
      { S::kValueBias } -> std::convertible_to<int32_t>;
    };

// Where registers hold the sums and totals of kGroupRows rows in two panels (`GroupProducts`).
template <typename S>
concept GroupVector = Int8Vector<S> && requires(typename S::V v, typename S::Weights weights) {
  { S::kGroupRows } -> std::convertible_to<int>;
  { S::spread_bytes(v) } -> std::same_as<typename S::Weights>;  // whole numbers of columns, as a line of bytes
  { S::sub_bytes(weights, weights) } -> std::same_as<typename S::Weights>;
};

// Lanes that hold pairs of bf16, whose products are summed in float32.
template <typename S>
concept PairVector = FloatVector<S> && requires(typename S::V v, typename S::V (&two)[2], uint32_t bits,
                                                const int8_t* from_i8, const uint8_t* from_e4m3) {
  { S::round_pairs(v, v) } -> std::same_as<typename S::V>;
  { S::load_i8_pairs(from_i8, from_i8) } -> std::same_as<typename S::V>;
  { S::load_e4m3_pairs(from_e4m3, from_e4m3) } -> std::same_as<typename S::V>;
  S::template load_i8_quads<1>(two, from_i8);
  S::template load_value_quads<3, 7>(two, from_i8, S::value_table(from_i8));
  S::template load_code_quads<6, 3>(two, from_i8);
  { S::keep_bits(v, bits) } -> std::same_as<typename S::V>;
  { S::upper_bytes(from_i8) } -> std::same_as<typename S::UpperBytes>;
  { S::template restored_pairs<3>(from_i8, S::upper_bytes(from_i8)) } -> std::same_as<typename S::V>;
};

// Eight tiles of 16 rows of 64 bytes.
template <typename T>
concept TileRegisters = std::constructible_from<T, int64_t> && requires(T tiles, const void* from, void* to) {
  tiles.template zero<0>();
  tiles.template load<4>(from);
  tiles.template load_once<6>(from);
  tiles.template store<0>(to);
  tiles.template dot_bf16<0, 4, 6>();
  tiles.template dot_int8<0, 4, 6>();
};

}  // namespace ingot
