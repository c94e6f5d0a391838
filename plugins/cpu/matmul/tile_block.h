// Products of tiles of rows with tiles of weights on tile registers: how weights come to their tiles, and a block of
// sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "isa/cpu_isa.h"
#include "matmul/matmul_parts.h"
#include "matmul/quantised.h"

namespace ingot {
namespace {

// How a weight comes to its tiles: kTiles of them from each KiB (unit) that is stored, by unpack where that is not the
// tile itself; meanwhile it fetches the KiB at `ahead`.
struct Bf16Tiles {
  static constexpr int64_t kTiles = 1;
  static constexpr bool kInPlace = true, kScaled = false;  // whether panels begin with scales
  int64_t k;

  template <typename Args>
  explicit Bf16Tiles(const Args& args) : k(args.k) {}
  int64_t panel_bytes() const { return ceil_div(k, 32) * kTileBytes; }
  int64_t data_offset() const { return 0; }
  template <typename S>
  PlainSums<S> sums(const MatmulArgs&) const {
    return {};
  }
};

template <typename I, typename Format>
struct Int8Tiles : Format {
  static constexpr bool kInPlace = Format::kTiles == 1, kScaled = true;

  using Format::Format;
  void unpack(const std::byte* panel, int64_t unit, std::byte* to, const std::byte* ahead) const {
    if constexpr (!kInPlace) Format::template unpack<I>(panel, unit, to, ahead);
  }
};

// Quantised weights as bf16, which holds them exactly.
template <typename I, typename Format>
struct NarrowedTiles : Format {
  static constexpr int64_t kTiles = 2 * Format::kTiles;
  static constexpr bool kInPlace = false, kScaled = true;

  using Format::Format;
  void unpack(const std::byte* panel, int64_t unit, std::byte* to, const std::byte* ahead) const {
    alignas(64) std::byte bytes[Format::kTiles * kTileBytes];
    const std::byte* lines = bytes;
    if constexpr (Format::kTiles == 1) {
      lines = panel + this->data_offset() + unit * kTileBytes;
      for (int64_t at = 0; at < kTileBytes; at += kLineBytes) I::prefetch_codes(ahead + at);
    } else {
      Format::template unpack<I>(panel, unit, bytes, ahead);
    }
    narrow_lines<I>(lines, Format::kTiles * kTileLines, to);
  }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, this->panel_bytes()};
  }
};

// FP8 as bf16. In groups, numbers are rounded to it after the group's scale has multiplied them. S: rounds, I: widens;
// Pairs: does both on CPUs that permute bytes, or void.
template <typename S, typename I, typename Pairs>
struct F8Tiles : F8 {
  static constexpr int64_t kTiles = 2;
  static constexpr bool kInPlace = false, kScaled = true;

  using F8::F8;
  void unpack(const std::byte* panel, int64_t unit, std::byte* to, const std::byte* ahead) const {
    const std::byte* const lines = stored(panel, unit * kTileK);
    const int64_t shared = group == 0 ? kTileLines : std::min(group / kLineK, kTileLines);  // lines of a scale
    for (int64_t begin = 0; begin < kTileLines; begin += shared) {
      const float* scales = this->scales(panel, unit * kTileK + begin * kLineK);
      for (int64_t at = begin; at < begin + shared; ++at) {
        S::prefetch(ahead + at * kLineBytes);
        widen(lines + at * kLineBytes, scales, to + 2 * at * kLineBytes);
      }
    }
  }
  template <typename E>
  ScaledSums<E> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

 private:
  // Four k, or two pairs of them.
  [[gnu::always_inline]] static inline void widen(const std::byte* line, const float* scales, std::byte* to) {
    if constexpr (!std::is_void_v<Pairs>)
      if (permutes_bytes) [[likely]]
        return scales == nullptr ? Pairs::store(to, line) : Pairs::store(to, line, S::load(scales));
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const auto scale = S::mul(scales == nullptr ? S::set1(1.0f) : S::load(scales + i), S::set1(kF8Unit));
      const auto number = [&]<int kK>() { return S::mul(PanelF8::load<I, kK>(line, static_cast<int>(i)), scale); };
      S::store_bf16_pairs(to + i * 4, number.template operator()<0>(), number.template operator()<1>());
      S::store_bf16_pairs(to + kLineBytes + i * 4, number.template operator()<2>(), number.template operator()<3>());
    }
  }
};

// Tiles of several panels, one after another, and lines to read ahead meanwhile, so many in each step; kFar: to L2,
// where what is multiplied meanwhile fills L1.
template <typename S, bool kFar = false>
struct TilesInMemory {
  const std::byte* const* tiles;
  const std::byte* const* ahead;
  int64_t ahead_lines;

  const std::byte* tile(int panel, int64_t step) const { return tiles[panel] + step * kTileBytes; }
  void work(int panel, int64_t step) const {
    for (int64_t line = 0; line < ahead_lines; ++line) {
      const std::byte* const next = ahead[panel] + (step * ahead_lines + line) * kLineBytes;
      kFar ? S::prefetch_far(next) : S::prefetch(next);
    }
  }
};

// Tiles of panels that are read once, kPanels at a time: each tile is fetched 8 KiB of them before its use, the first
// ones of the next panels too.
template <typename S, int kPanels>
struct TilesOnce {
  static constexpr int64_t kAhead = 8 / kPanels;
  const std::byte* const* tiles;
  const std::byte* const* next;
  int64_t steps;

  const std::byte* tile(int panel, int64_t step) const { return tiles[panel] + step * kTileBytes; }
  void work(int panel, int64_t step) const {
    const int64_t at = step + kAhead;
    const std::byte* from = at < steps ? tile(panel, at) : next[panel] + (at - steps) * kTileBytes;
    for (int64_t line = 0; line < kTileBytes; line += kLineBytes) S::prefetch(from + line);
  }
};

// Tiles that are unpacked kLead KiB of weights before their use, the first ones of the next panels too.
template <typename Weight, int kPanels>
struct TileRing {
  static constexpr int64_t kLead = Weight::kTiles > 2 ? 1 : 3, kSlots = kLead + 1, kAhead = 2;  // units
  static constexpr int64_t kBytes = kPanels * kSlots * Weight::kTiles * kTileBytes;
  const Weight& weight;
  const std::byte* const* panels;
  const std::byte* const* next;  // null where those are to start anew
  int64_t units;                 // KiB of a panel
  int64_t first;                 // units that went through the slots before
  std::byte* slots;

  static bool goes_on(int64_t units) { return units >= kLead + kAhead; }  // whether there may be next panels
  std::byte* slot(int panel, int64_t unit) const {
    return slots + (panel * kSlots + (first + unit) % kSlots) * Weight::kTiles * kTileBytes;
  }
  void start(int count) const {
    for (int panel = 0; panel < count; ++panel)
      for (int64_t unit = 0; unit < std::min(kLead, units); ++unit) unpack(panel, unit);
  }
  const std::byte* tile(int panel, int64_t step) const {
    return slot(panel, step / Weight::kTiles) + step % Weight::kTiles * kTileBytes;
  }
  void work(int panel, int64_t step) const {
    const int64_t unit = step / Weight::kTiles + kLead;
    if (step % Weight::kTiles == 0 && (unit < units || next != nullptr)) unpack(panel, unit);
  }

 private:
  // Units from `units` on are those of the next panels.
  void unpack(int panel, int64_t unit) const {
    const auto after = [this](int64_t at) { return at >= units && next != nullptr; };
    const int64_t ahead = unit + kAhead;
    weight.unpack(
        after(unit) ? next[panel] : panels[panel], after(unit) ? unit - units : unit, slot(panel, unit),
        (after(ahead) ? next[panel] - units * kTileBytes : panels[panel]) + weight.data_offset() + ahead * kTileBytes);
  }
};

template <typename Sum>
struct BlockArgs {
  const std::byte* x;  // tiles of the first K step
  int64_t step_bytes;
  int64_t steps;
  Sum* sums;  // [panel][row][16], continued unless `first`
  int64_t panel_stride;
  bool first;
};

// kRowTiles x kPanels tiles of sums, at most four: each tile of x and of weight read serves several products.
template <typename Rows, int kRowTiles, int kPanels, bool kOnce, typename Tiles, typename Source>
void block(Tiles& tiles, const BlockArgs<typename Rows::Sum>& args, const Source& weights) {
  constexpr std::make_integer_sequence<int, kRowTiles> kEachRow;
  constexpr std::make_integer_sequence<int, kPanels> kEachPanel;
  constexpr std::make_integer_sequence<int, kRowTiles * kPanels> kEachSum;
  const auto sums_at = [&](int i) { return args.sums + i % kPanels * args.panel_stride + i / kPanels * 256; };
  for_each(kEachSum, [&]<int kI>() {
    if (args.first) {
      tiles.template zero<kI>();
    } else {
      tiles.template load<kI>(sums_at(kI));
    }
  });
  const std::byte* x = args.x;
  for (int64_t step = 0; step < args.steps; ++step, x += args.step_bytes) {
    for_each(kEachRow, [&]<int kR>() {
      if constexpr (kOnce) {
        tiles.template load_once<4 + kR>(x + kR * kTileBytes);
      } else {
        tiles.template load<4 + kR>(x + kR * kTileBytes);
      }
    });
    for_each(kEachPanel, [&]<int kP>() {
      tiles.template load<6 + kP % 2>(weights.tile(kP, step));
      weights.work(kP, step);
      for_each(kEachRow, [&]<int kR>() { Rows::template dot<kR * kPanels + kP, 4 + kR, 6 + kP % 2>(tiles); });
    });
  }
  for_each(kEachSum, [&]<int kI>() { tiles.template store<kI>(sums_at(kI)); });
}

}  // namespace
}  // namespace ingot
