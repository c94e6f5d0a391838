// The formats of quantised weights, as src/ingot/weight_formats.py has them; a test holds the two tables equal.
// Bindings read sizes from here, and the structs that kernels read a format by are held against it (quantised.h).
#pragma once

#include <cstdint>
#include <string_view>

namespace ingot {

constexpr int64_t kPanel = 16;         // columns of a panel
constexpr int64_t kHeaderBytes = 128;  // of a quantised panel: scales, float32, and sums, int32
constexpr int64_t kUnitK = 256;        // columns whose groups share units

struct WeightFormat {
  std::string_view dtype;  // in plans and names of kernels; those with int8 activations add "a8" to it
  int64_t bits;            // of a code
  int64_t k_block;         // columns of a packed row are filled up to a multiple of it
  int64_t groups[4];       // columns that may share a multiplier or scale; 0, nothing else: none do
  bool rows_alone;         // whether rows may have no groups where others have
  int64_t group_bytes;  // of a group in one row: an int8 multiplier, float16 numbers, a float32 scale or int8 numbers
  int64_t unit_bytes;   // of kUnitK columns in one row: the float16 units of their int8 numbers; 0: they have none
  bool in_tables;       // tables of token and position rows may have it
};

constexpr WeightFormat kW8{.dtype = "w8",
                           .bits = 8,
                           .k_block = 64,
                           .groups = {0},
                           .rows_alone = false,
                           .group_bytes = 0,
                           .unit_bytes = 0,
                           .in_tables = true};
constexpr WeightFormat kW4{.dtype = "w4",
                           .bits = 4,
                           .k_block = 128,
                           .groups = {128, 64, 32},
                           .rows_alone = false,
                           .group_bytes = 1,
                           .unit_bytes = 0,
                           .in_tables = false};
constexpr WeightFormat kW2t{.dtype = "w2t",
                            .bits = 2,
                            .k_block = 128,
                            .groups = {128, 64, 32, 16},
                            .rows_alone = false,
                            .group_bytes = 2,
                            .unit_bytes = 0,
                            .in_tables = false};
constexpr WeightFormat kW3t{.dtype = "w3t",
                            .bits = 3,
                            .k_block = 128,
                            .groups = {128, 64, 32},
                            .rows_alone = false,
                            .group_bytes = 2,
                            .unit_bytes = 0,
                            .in_tables = false};
constexpr WeightFormat kW4t{.dtype = "w4t",
                            .bits = 4,
                            .k_block = 128,
                            .groups = {128, 64, 32, 16},
                            .rows_alone = false,
                            .group_bytes = 2,
                            .unit_bytes = 0,
                            .in_tables = false};
constexpr WeightFormat kW4ts{.dtype = "w4ts",
                             .bits = 4,
                             .k_block = 128,
                             .groups = {128, 64, 32, 16},
                             .rows_alone = false,
                             .group_bytes = 4,
                             .unit_bytes = 0,
                             .in_tables = false};
constexpr WeightFormat kW8t{.dtype = "w8t",
                            .bits = 8,
                            .k_block = 128,
                            .groups = {128, 64, 32, 16},
                            .rows_alone = false,
                            .group_bytes = 2,
                            .unit_bytes = 0,
                            .in_tables = false};
constexpr WeightFormat kW8ts{.dtype = "w8ts",
                             .bits = 8,
                             .k_block = 128,
                             .groups = {128, 64, 32, 16},
                             .rows_alone = false,
                             .group_bytes = 4,
                             .unit_bytes = 0,
                             .in_tables = false};
constexpr WeightFormat kW2ks{.dtype = "w2ks",
                             .bits = 2,
                             .k_block = kUnitK,
                             .groups = {16},
                             .rows_alone = false,
                             .group_bytes = 2,
                             .unit_bytes = 4,
                             .in_tables = false};
constexpr WeightFormat kW3k{.dtype = "w3k",
                            .bits = 3,
                            .k_block = kUnitK,
                            .groups = {16},
                            .rows_alone = false,
                            .group_bytes = 1,
                            .unit_bytes = 2,
                            .in_tables = false};
constexpr WeightFormat kW4ks{.dtype = "w4ks",
                             .bits = 4,
                             .k_block = kUnitK,
                             .groups = {32},
                             .rows_alone = false,
                             .group_bytes = 2,
                             .unit_bytes = 4,
                             .in_tables = false};
constexpr WeightFormat kW5ks{.dtype = "w5ks",
                             .bits = 5,
                             .k_block = kUnitK,
                             .groups = {32},
                             .rows_alone = false,
                             .group_bytes = 2,
                             .unit_bytes = 4,
                             .in_tables = false};
constexpr WeightFormat kW6k{.dtype = "w6k",
                            .bits = 6,
                            .k_block = kUnitK,
                            .groups = {32, 16},
                            .rows_alone = false,
                            .group_bytes = 1,
                            .unit_bytes = 2,
                            .in_tables = false};
constexpr WeightFormat kF8{.dtype = "f8",
                           .bits = 8,
                           .k_block = 64,
                           .groups = {128, 64, 32, 16},
                           .rows_alone = true,
                           .group_bytes = 4,
                           .unit_bytes = 0,
                           .in_tables = false};

constexpr WeightFormat kWeightFormats[] = {kW8,   kW4,   kW2t, kW3t,  kW4t,  kW4ts, kW8t,
                                           kW8ts, kW2ks, kW3k, kW4ks, kW5ks, kW6k,  kF8};
constexpr WeightFormat kTableFormat = kW8;
static_assert(kTableFormat.in_tables);

// bf16 in 12 bits, without loss: a panel has a table of upper bytes, patches and their counts, then tiles.
struct Compressed {
  std::string_view dtype;
  int64_t tile_k;       // k of a tile
  int64_t tile_bytes;   // of codes and lower bytes
  int64_t table_bytes;  // of upper bytes

  constexpr int64_t tiles(int64_t k) const { return (k + tile_k - 1) / tile_k; }
  // Four bytes for each patch, two for the number of those before each tile and before the end.
  constexpr int64_t header_bytes(int64_t k) const { return (table_bytes + 6 * tiles(k) + 2 + 63) / 64 * 64; }
  constexpr int64_t counts_offset(int64_t k) const { return header_bytes(k) - 2 * (tiles(k) + 1); }
  constexpr int64_t panel_bytes(int64_t k) const { return header_bytes(k) + tiles(k) * tile_bytes; }
};
constexpr Compressed kCompressed{.dtype = "bf16c", .tile_k = 32, .tile_bytes = 768, .table_bytes = 16};

}  // namespace ingot
