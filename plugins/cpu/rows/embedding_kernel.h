// y[t] = table[ids[t]] * scale (+ position_table[positions[t]]), widened to float32. Reads 4, 2 or 1 bytes per element.
#pragma once

#include "ingot/kernel.h"
#include "isa/simd_lanes.h"
#include "rows/embedding_args.h"

namespace ingot {
namespace {

template <typename T>
struct PlainTable {
  const T* data;
  int64_t hidden;

  template <typename S>
  struct Row {
    const T* data;
    typename S::V lanes(int64_t i, int64_t left) const { return load_lanes<S>(data + i, left); }
  };
  template <typename S>
  Row<S> row(int64_t number) const {
    return {data + number * hidden};
  }
};

// Layout row.w8: a float32 scale, then the row's int8, zeros up to a multiple of 4 bytes.
template <typename Byte>
struct W8Table {
  const Byte* data;
  int64_t hidden;

  template <typename S>
  struct Row {
    const int8_t* codes;
    typename S::V scale;
    typename S::V lanes(int64_t i, int64_t left) const {
      return S::mul(left >= S::kWidth ? S::load_i8(codes + i) : S::load_i8_partial(codes + i, left), scale);
    }
  };
  template <typename S>
  Row<S> row(int64_t number) const {
    const Byte* start = data + number * (4 + (hidden + 3) / 4 * 4);
    return {reinterpret_cast<const int8_t*>(start + 4), S::set1(*reinterpret_cast<const float*>(start))};
  }
};

template <typename S, template <typename> typename Table, typename T>
void embedding(const EmbeddingArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.rows);
  const Table<T> table{static_cast<const T*>(args.table), args.hidden};
  const Table<T> position_table{static_cast<const T*>(args.position_table), args.hidden};
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const auto row = table.template row<S>(args.ids[t]);
    float* y = args.y + t * args.hidden;
    for (int64_t i = 0; i < args.hidden; i += S::kWidth) {
      const int64_t left = args.hidden - i;
      typename S::V v = S::mul(row.lanes(i, left), S::set1(args.scale));
      if (args.position_table) v = S::add(v, position_table.template row<S>(args.positions[t]).lanes(i, left));
      store_lanes<S>(y + i, v, left);
    }
  }
}

}  // namespace
}  // namespace ingot
