// What all matrix products share: where a panel lies, what a sum is multiplied by, the epilogue, and the cut into
// pieces of work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ingot/kernel.h"
#include "isa/prefetch.h"
#include "isa/simd_lanes.h"
#include "matmul/activations.h"
#include "matmul/matmul_args.h"
#include "matmul/weight_formats.h"

namespace ingot {
namespace {

constexpr int64_t kLineBytes = 64;  // a panel is a stream of lines: 16 columns x one k (f32) or two k (bf16)

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename F, int... kI>
[[gnu::always_inline]] inline void for_each(std::integer_sequence<int, kI...>, [[maybe_unused]] F f) {
  (f.template operator()<kI>(), ...);
}

// What lies ahead in a panel that kRows rows read once.
template <typename S, int kRows>
[[gnu::always_inline]] inline void prefetch_panel(const std::byte* line) {
  if constexpr (kRows <= S::kReadingRows) {
    S::prefetch_reading(line);
  } else {
    S::prefetch_stream(line);
  }
}

// Whether rows, all in one group, read panels one after another because memory is faster so.
template <typename S>
bool one_stream(int64_t groups) {
  return S::kWidth == kPanel && groups == 1 && reads_one_stream();
}
// The same of codes, of which more rows keep a stream waiting.
template <typename I>
bool streams_codes(int64_t rows, int64_t groups) {
  if constexpr (requires { I::kStreamedRows; }) return rows <= I::streamed_rows() && one_stream<I>(groups);
  return false;
}
// The same of codes with tables or scales of groups: of one row, or of kMost where that is faster.
template <typename I, int kMost>
bool streams_grouped_codes(int64_t rows, int64_t groups) {
  return rows == 1 || (reads_in_order() && rows <= kMost && one_stream<I>(groups));
}
// Rows of tiles that ask for such codes as for one stream.
template <typename I, int kMost>
constexpr int kRowsOfStreams = 1;
template <typename I, int kMost>
  requires requires { I::kStreamedRows; }
constexpr int kRowsOfStreams<I, kMost> = kMost;

// Reads what lies before the codes of a panel, all of it and in order, so that the codes then follow in the same
// stream. Without this, their scales would be a second one.
inline void read_header(const std::byte* panel, const std::byte* codes) {
  for (; panel < codes; panel += kLineBytes) static_cast<void>(*static_cast<const volatile std::byte*>(panel));
}

// What lies ahead in a panel of int8 or int4 without tables, where the CPU wants to be asked for them in another way.
template <typename I, int kRows>
[[gnu::always_inline]] inline void prefetch_streamed_codes(const std::byte* line) {
  if constexpr (requires { I::kStreamedRows; }) {
    if constexpr (kRows <= I::kRowsInOrder) return I::prefetch_in_order(line);
    if constexpr (kRows <= I::kStreamedRows) return I::prefetch_one_stream(line);
  }
  prefetch_panel<I, kRows>(line);
}

// What lies ahead in codes with tables or scales of groups. beside: bytes of scales that the codes of the panel before
// `line` have had, where they have a scale for each group.
template <typename I, int kRows>
[[gnu::always_inline]] inline void prefetch_codes_once(const std::byte* line, int64_t beside) {
  if constexpr (requires { I::prefetch_codes_once(line, beside); } && kRows <= kRowsOfStreams<I, kRows>) {
    I::prefetch_codes_once(line, beside);
  } else {
    prefetch_panel<I, kRows>(line);
  }
}

// Behind the codes of a group whose scales are not among `beside` yet.
template <typename I, int kRows>
[[gnu::always_inline]] inline void prefetch_beside_codes(const std::byte* line, int64_t beside) {
  if constexpr (requires { I::prefetch_beside_codes(line, beside); } && kRows <= kRowsOfStreams<I, kRows>)
    I::prefetch_beside_codes(line, beside);
}

inline const std::byte* panel_at(const MatmulArgs& args, int64_t panel, int64_t panel_bytes) {
  const WeightSlice* piece = args.pieces;
  while (panel >= piece->end) ++piece;
  return piece->data + (panel - piece->begin) * panel_bytes;
}

// Where a product's rows are prepared, and by whom: many by the team, which then waits for all, few by every thread for
// itself.
class OwnOrShared {
 public:
  OwnOrShared(const MatmulArgs& args, const Team& team)
      : team_(team), own_(args.rows * args.k <= kPrivateRowElements) {}

  std::byte* memory(size_t bytes) const { return own_ ? team_.rows_scratch(bytes) : team_.shared; }
  Team::Range share(int64_t n) const { return own_ ? Team::Range{0, n} : team_.share(n); }
  void wait() const {
    if (!own_) team_.barrier();
  }

 private:
  const Team& team_;
  bool own_;
};

// Rows of x for those who prepare them. One that has to be normed first lies in a place of the thread's scratch, until
// the next that is to lie there.
class RowsOfX {
 public:
  RowsOfX(const MatmulArgs& args, const Team& team, int64_t places = 1)
      : args_(args),
        team_(team),
        normed_(args.norm ? reinterpret_cast<float*>(team.scratch(static_cast<size_t>(places * args.k) * sizeof(float)))
                          : nullptr) {}

  const float* operator()(int64_t row, int64_t place = 0) const {
    if (args_.norm == nullptr) return args_.x + row * args_.k;
    float* const to = normed_ + place * args_.k;
    args_.norm->row(row, to, team_);
    return to;
  }
  // What the next row is read from.
  const float* next(int64_t row) const { return (args_.norm ? args_.norm->args.x : args_.x) + (row + 1) * args_.k; }

 private:
  const MatmulArgs& args_;
  const Team& team_;
  float* normed_;
};

// What the epilogue makes of a sum first. columns(panel, i) are S::kWidth columns from i on, of(p, row) their products.
template <typename S>
struct PlainSums {
  struct Columns {
    typename S::V of(const float* sums, int64_t) const { return S::load(sums); }
  };
  Columns columns(int64_t, int64_t) const { return {}; }
};

// Quantised weights begin each panel with the scales of its columns.
template <typename S>
struct ScaledSums {
  struct Columns {
    typename S::V scale;
    typename S::V of(const float* sums, int64_t) const { return S::mul(S::load(sums), scale); }
  };
  const MatmulArgs& args;
  int64_t panel_bytes;

  Columns columns(int64_t panel, int64_t i) const {
    return {S::load(reinterpret_cast<const float*>(panel_at(args, panel, panel_bytes)) + i)};
  }
};

// Sums of rows that were rounded to int8, in int32 or, by groups, in float32: x_scales [rows].
template <typename S>
struct Int8Sums {
  struct Columns {
    typename S::V scale;
    const float* x_scales;
    typename S::V of(const int32_t* sums, int64_t row) const {
      return S::mul(S::load_int(sums), S::mul(S::set1(x_scales[row]), scale));
    }
    typename S::V of(const float* sums, int64_t row) const {
      return S::mul(S::load(sums), S::mul(S::set1(x_scales[row]), scale));
    }
  };
  ScaledSums<S> weight;
  const float* x_scales;

  Columns columns(int64_t panel, int64_t i) const { return {weight.columns(panel, i).scale, x_scales}; }
};

// Whether y goes past the caches, where S can do that: what L2 would not hold comes back from beyond anyway, and a line
// that is not read before it is written is worth no room there. Lines of a residual are there already.
template <typename S>
bool streams_y(const MatmulArgs& args) {
  constexpr int64_t kBytes = 2 << 20;
  if constexpr (requires { S::fence(); }) {
    const int64_t out = args.gated ? args.n / 2 : args.n;
    const bool whole_lines = out % kPanel == 0 && reinterpret_cast<uintptr_t>(args.y) % kLineBytes == 0;
    return args.residual == nullptr && whole_lines && args.rows * out * int64_t{sizeof(float)} >= kBytes;
  }
  return false;
}

template <typename S>
void end_streams(const MatmulArgs& args) {
  if constexpr (requires { S::fence(); }) {
    if (streams_y<S>(args)) S::fence();
  }
}

template <typename S, Activation kActivation, bool kGated, typename T, typename Sums>
void epilogue_of(const MatmulArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t panels, const T* sums,
                 int64_t panel_stride, const Sums& made) {
  using V = typename S::V;
  constexpr int64_t kPanels = kGated ? 2 : 1;  // that make 16 columns of y
  const int64_t out = args.n / kPanels;
  const bool biased = args.bias != nullptr, streams = streams_y<S>(args);
  for (int64_t p = 0; p < panels; p += kPanels, sums += kPanels * panel_stride) {
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const int64_t col = (panel + p) / kPanels * kPanel + i, left = out - col;
      if (left <= 0) break;
      const V bias = biased ? load_lanes<S>(args.bias + col, left) : S::zero();
      const V up_bias = biased && kGated ? load_lanes<S>(args.bias + out + col, left) : S::zero();
      const auto columns = made.columns(panel + p, i), up_columns = made.columns(panel + p + kPanels - 1, i);
      const auto number = [&](int64_t r) __attribute__((always_inline)) {
        V v = columns.of(sums + r * kPanel + i, row + r);
        if (biased) v = S::add(v, bias);
        v = activate<S>(kActivation, v);
        if constexpr (kGated) {
          V up = up_columns.of(sums + panel_stride + r * kPanel + i, row + r);
          if (biased) up = S::add(up, up_bias);
          v = S::mul(v, up);
        }
        return v;
      };
      const int64_t at = row * out + col;
      float* y = args.y + at;
      if constexpr (requires { S::fence(); }) {
        if (streams) {
          for (int64_t r = 0; r < rows; ++r, y += out) S::stream(y, number(r));
          continue;
        }
      }
      if (args.residual != nullptr) {
        const float* residual = args.residual + at;
        for (int64_t r = 0; r < rows; ++r, y += out, residual += out)
          store_lanes<S>(y, S::add(number(r), load_lanes<S>(residual, left)), left);
      } else {
        for (int64_t r = 0; r < rows; ++r, y += out) store_lanes<S>(y, number(r), left);
      }
    }
  }
}

// Writes y of `rows` rows from `row` on and of panels [panel, panel + panels) from their sums.
// sums: [panels][panel_stride], in them [rows][16]. Order: + bias, activation, gate, + residual.
template <typename S, typename T, typename Sums>
void epilogue(const MatmulArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t panels, const T* sums,
              int64_t panel_stride, const Sums& made) {
  constexpr int64_t kAtOnce = 8;  // a few rows in all panels: the lines of each lie together, and so do their pages
  for (int64_t r = 0; r < rows; r += kAtOnce) {
    const auto some = [&]<Activation kActivation>() {
      const int64_t count = std::min(kAtOnce, rows - r);
      if (args.gated)
        epilogue_of<S, kActivation, true>(args, row + r, count, panel, panels, sums + r * kPanel, panel_stride, made);
      else
        epilogue_of<S, kActivation, false>(args, row + r, count, panel, panels, sums + r * kPanel, panel_stride, made);
    };
    switch (args.activation) {
#define INGOT_ACTIVATION(enumerator, name, value)       \
  case Activation::enumerator:                          \
    some.template operator()<Activation::enumerator>(); \
    break;
      INGOT_ACTIVATIONS(INGOT_ACTIVATION)
#undef INGOT_ACTIVATION
    }
  }
}

// The product cut into blocks of rows x panels, of which threads take neighbouring ones. Numbers do not depend on the
// cut.
struct Blocks {
  int64_t rows, panels;              // of a block
  int64_t row_blocks, panel_blocks;  // of the product

  int64_t count() const { return row_blocks * panel_blocks; }
  // Neighbours have the same rows, as far as these go.
  int64_t row_block(int64_t item) const { return item / panel_blocks; }
  int64_t first_panel(int64_t item) const { return item % panel_blocks * panels; }
};

// The largest blocks. Tactic 1 is the other choice that a build may time: blocks also for the few rows that otherwise
// pass over contiguous panels, and for many rows blocks of twice as many rows and half as many panels.
struct BlockLimits {
  int64_t rows, panels;
};

inline bool passes_over_panels(const MatmulArgs& args, int64_t few_rows) {
  return args.rows <= few_rows && args.tactic != 1;
}

inline BlockLimits block_limits(const MatmulArgs& args, int64_t few_rows, int64_t rows, int64_t panels) {
  return args.rows > few_rows && args.tactic == 1 ? BlockLimits{2 * rows, panels / 2} : BlockLimits{rows, panels};
}

// Divides all panels among the threads, of which each calls pass(begin, end) for its own. A thread has a contiguous
// range, the same one in each call. The last quarter of each range is cut into pieces: a thread that has finished its
// own takes those of its group that are left, since cores seldom read at the same speed, and all wait for the last one.
// Nothing is fetched ahead of a piece, so pieces are large. at_once: panels that `pass` reads side by side.
template <typename F>
void share_panels(const MatmulArgs& args, const Team& team, int64_t at_once, int64_t panel_bytes, const F& pass) {
  constexpr int64_t kPieceBytes = 128 << 10, kCutPart = 4;
  const int64_t width = args.gated ? 2 : 1, all = args.num_panels / width;
  const int64_t piece = ceil_div(kPieceBytes, at_once * panel_bytes) * at_once / width;
  const Team::Range group = team.group();
  const int64_t threads = group.end - group.begin;
  const int64_t pieces = threads > 1 ? all / team.count / kCutPart / piece : 0;  // of each thread
  const auto begin_of = [&](int64_t thread) { return all * thread / team.count; };
  pass(begin_of(team.index) * width, (begin_of(team.index + 1) - pieces * piece) * width);
  if (pieces == 0) return;
  const int64_t items = pieces * threads;
  for (int64_t item = team.next_of_group_shares(items); item < items; item = team.next_of_group_shares(items)) {
    const int64_t end = begin_of(group.begin + item / pieces + 1) - (pieces - 1 - item % pieces) * piece;
    pass((end - piece) * width, end * width);
  }
}

// Blocks within the limits (of rows: a multiple of row_step), and smaller ones until every thread has several.
inline Blocks cut(const MatmulArgs& args, int threads, int64_t row_step, const BlockLimits& limits,
                  int64_t several = 6) {
  constexpr int64_t kMinPanels = 4;
  const auto even = [](int64_t all, int64_t most, int64_t step) {
    return ceil_div(ceil_div(all, ceil_div(all, most)), step) * step;
  };
  const auto blocks = [&](int64_t rows, int64_t panels) {
    const int64_t even_rows = even(args.rows, rows, row_step), even_panels = even(args.num_panels, panels, 2);
    return Blocks{even_rows, even_panels, ceil_div(args.rows, even_rows), ceil_div(args.num_panels, even_panels)};
  };
  Blocks best = blocks(limits.rows, limits.panels);
  const int64_t wanted = threads == 1 ? 1 : several * threads;
  while (best.count() < wanted && best.panels > kMinPanels) best = blocks(best.rows, best.panels / 2);
  while (best.count() < wanted && best.rows > row_step) best = blocks(best.rows / 2, best.panels);
  return best;
}

}  // namespace
}  // namespace ingot
