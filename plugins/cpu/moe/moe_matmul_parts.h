// What the products of experts share: which slots take each expert, where its panels lie, and the order of the work.
// A slot's number is row * slots + its place in the row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ingot/kernel.h"
#include "matmul/activations.h"
#include "matmul/matmul_parts.h"
#include "matmul/quantised.h"
#include "moe/moe_matmul_args.h"

namespace ingot {
namespace {

// The slots by expert, ascending; every thread counts them out for itself, so that nobody waits.
class SlotLists {
 public:
  static size_t bytes(const MoeMatmulArgs& args) {
    return static_cast<size_t>(ceil_div((args.experts + 2 + args.rows * args.slots) * 4, 64) * 64);
  }

  SlotLists(const MoeMatmulArgs& args, std::byte* memory)
      : starts_(reinterpret_cast<int32_t*>(memory)), slots_(starts_ + args.experts + 2) {
    const int64_t count = args.rows * args.slots;
    std::fill_n(starts_, args.experts + 2, 0);
    for (int64_t slot = 0; slot < count; ++slot) ++starts_[expert_of(args, slot) + 2];
    for (int64_t e = 2; e <= args.experts; ++e) starts_[e + 1] += starts_[e];
    for (int64_t slot = 0; slot < count; ++slot)
      slots_[starts_[expert_of(args, slot) + 1]++] = static_cast<int32_t>(slot);
  }

  int64_t count(int64_t expert) const { return starts_[expert + 1] - starts_[expert]; }
  const int32_t* slots(int64_t expert) const { return slots_ + starts_[expert]; }

 private:
  // A number that is no expert's, which moe_route never gives, counts as the nearest one's.
  static int64_t expert_of(const MoeMatmulArgs& args, int64_t slot) {
    const float id = args.ids[slot], last = static_cast<float>(args.experts - 1);
    return id > 0 ? static_cast<int64_t>(id < last ? id : last) : 0;
  }

  int32_t *starts_, *slots_;
};

inline const std::byte* expert_panel(const MoeMatmulArgs& args, int64_t expert, int64_t panel, int64_t panel_bytes) {
  const WeightSlice* piece = args.pieces;
  while (panel >= piece->end) ++piece;
  return piece->data + (expert * (piece->end - piece->begin) + panel - piece->begin) * panel_bytes;
}

// Panels [panel, panel + panels) of an expert times the rows of some slots: sums[panel][stride floats], in them
// [slot][16].
struct ExpertSums {
  int64_t expert;
  const int32_t* slots;
  int64_t count, panel, panels;
  const float* sums;
  int64_t stride;
};

// Sums of quantised weights, times the scales that their panels begin with, and the scales of rows that were rounded to
// int8; these are null for rows that were not.
template <typename S, typename T>
void scale_sums(const std::byte* const* panels, int64_t count, int64_t rows, T* sums, int64_t stride,
                const float* row_scales) {
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const auto scale = S::load(panel_scales(panels[p]) + i);
      for (int64_t r = 0; r < rows; ++r) {
        T* at = sums + p * stride + r * kPanel + i;
        if constexpr (std::is_same_v<T, float>) {
          S::store(at, S::mul(S::load(at), row_scales == nullptr ? scale : S::mul(S::set1(row_scales[r]), scale)));
        } else {
          S::store(reinterpret_cast<float*>(at), S::mul(S::load_int(at), S::mul(S::set1(row_scales[r]), scale)));
        }
      }
    }
  }
}

// activation(gate) * up, or what a limit makes of them: see plugins/ops/moe_gate_up.py. NaN stays NaN.
template <typename S>
[[gnu::always_inline]] inline typename S::V gated(const MoeMatmulArgs& args, typename S::V gate, typename S::V up) {
  using V = typename S::V;
  if (args.limit == 0) return S::mul(activate<S>(args.activation, gate), up);
  const V limit = S::set1(args.limit);
  gate = S::min(limit, gate);
  up = S::max(S::set1(-args.limit), S::min(limit, up));
  return S::mul(over_logistic<S>(gate, S::mul(S::set1(args.alpha), gate)), S::add(up, S::set1(1.0f)));
}

// y of each slot, from gate and up panels that alternate.
template <typename S>
void store_gated(const MoeMatmulArgs& args, const ExpertSums& made) {
  using V = typename S::V;
  const int64_t out = args.n / 2;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + made.expert * args.n;
  for (int64_t p = 0; p < made.panels; p += 2) {
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const int64_t col = (made.panel + p) / 2 * kPanel + i, left = out - col;
      if (left <= 0) break;
      const V of_gate = bias == nullptr ? S::zero() : load_lanes<S>(bias + col, left);
      const V of_up = bias == nullptr ? S::zero() : load_lanes<S>(bias + out + col, left);
      const float* sum = made.sums + p * made.stride + i;
      for (int64_t s = 0; s < made.count; ++s, sum += kPanel) {
        V gate = S::load(sum), up = S::load(sum + made.stride);
        if (bias != nullptr) gate = S::add(gate, of_gate), up = S::add(up, of_up);
        store_lanes<S>(args.y + made.slots[s] * out + col, gated<S>(args, gate, up), left);
      }
    }
  }
}

// y of each slot, from panels without gates.
template <typename S>
void store_activated(const MoeMatmulArgs& args, const ExpertSums& made) {
  using V = typename S::V;
  for (int64_t p = 0; p < made.panels; ++p) {
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const int64_t col = (made.panel + p) * kPanel + i, left = args.n - col;
      if (left <= 0) break;
      const bool biased = args.bias != nullptr;
      const V bias = biased ? load_lanes<S>(args.bias + made.expert * args.n + col, left) : S::zero();
      const float* sum = made.sums + p * made.stride + i;
      for (int64_t s = 0; s < made.count; ++s, sum += kPanel) {
        const V v = biased ? S::add(S::load(sum), bias) : S::load(sum);
        store_lanes<S>(args.y + made.slots[s] * args.n + col, activate<S>(args.activation, v), left);
      }
    }
  }
}

// y of each slot's row gains its weighted sums.
template <typename S>
void add_weighted(const MoeMatmulArgs& args, const ExpertSums& made) {
  for (int64_t p = 0; p < made.panels; ++p) {
    for (int64_t i = 0; i < kPanel; i += S::kWidth) {
      const int64_t col = (made.panel + p) * kPanel + i, left = args.n - col;
      if (left <= 0) break;
      const float* sum = made.sums + p * made.stride + i;
      const float* bias = args.bias == nullptr ? nullptr : args.bias + made.expert * args.n + col;
      for (int64_t s = 0; s < made.count; ++s, sum += kPanel) {
        float* y = args.y + made.slots[s] / args.slots * args.n + col;
        auto v = S::load(sum);
        if (bias != nullptr) v = S::add(v, load_lanes<S>(bias, left));
        v = S::mul(S::set1(args.weights[made.slots[s]]), v);
        store_lanes<S>(y, S::add(load_lanes<S>(y, left), v), left);
      }
    }
  }
}

// One thread's part in a step. Product is how sums are made of gathered rows and of panels of some type:
//   kMaxRows, kMaxPanels      of one call
//   kFewRows                  a step of so many rows is bound by reading weights
//   Product(args, memory), scratch(args), panel_bytes()
//   set_rows(rows, count)     pointers to the rows [k]
//   multiply(panels, count)   makes their sums: sums(), stride() as in ExpertSums
template <typename Product>
class ExpertProducts {
 public:
  // slots_per_row: how many slots share a row of x.
  ExpertProducts(const MoeMatmulArgs& args, int64_t slots_per_row, const Team& team)
      : args_(args),
        slots_per_row_(slots_per_row),
        memory_(team.scratch(SlotLists::bytes(args) + Product::scratch(args))),
        lists_(args, memory_),
        product_(args, memory_ + SlotLists::bytes(args)) {}

  int64_t row_blocks(int64_t expert) const { return ceil_div(lists_.count(expert), Product::kMaxRows); }

  // Panels [panel, end) of an expert times one block of its slots; `finish` takes ExpertSums.
  template <typename Finish>
  void run_block(int64_t expert, int64_t row_block, int64_t panel, int64_t end, Finish finish) {
    const int64_t first = row_block * Product::kMaxRows;
    const int32_t* slots = lists_.slots(expert) + first;
    const int64_t count = std::min<int64_t>(Product::kMaxRows, lists_.count(expert) - first);
    const float* rows[Product::kMaxRows];
    for (int64_t s = 0; s < count; ++s) rows[s] = args_.x + slots[s] / slots_per_row_ * args_.k;
    product_.set_rows(rows, count);
    const std::byte* data[Product::kMaxPanels];
    for (int64_t panels; panel < end; panel += panels) {
      panels = std::min<int64_t>(Product::kMaxPanels, end - panel);
      for (int64_t p = 0; p < panels; ++p) data[p] = expert_panel(args_, expert, panel + p, product_.panel_bytes());
      product_.multiply(data, panels);
      finish(ExpertSums{expert, slots, count, panel, panels, product_.sums(), product_.stride()});
    }
  }

  // The same with all slots of an expert.
  template <typename Finish>
  void run(int64_t expert, int64_t panel, int64_t end, Finish finish) {
    for (int64_t block = 0; block < row_blocks(expert) && panel < end; ++block)
      run_block(expert, block, panel, end, finish);
  }

 private:
  const MoeMatmulArgs& args_;
  int64_t slots_per_row_;
  std::byte* memory_;
  SlotLists lists_;
  Product product_;
};

// How threads share a step. Numbers do not depend on it.
enum class Share {
  kOwnPanels,  // each has panels of its own, known beforehand
  kBlocks,     // they take blocks one after another
  kExperts,    // blocks of all panels that an expert has: its rows are gathered and rounded once
};

// Few rows, whose time goes into reading weights, are shipped with panels for each thread, many with blocks. A build
// may time the other of these two (tactic 1), and whole experts for moe_gate_up (tactic 2).
inline Share share_of(const MoeMatmulArgs& args, int64_t few_rows) {
  if (args.tactic == 2) return Share::kExperts;
  return (args.rows <= few_rows) == (args.tactic == 0) ? Share::kOwnPanels : Share::kBlocks;
}

// Few rows: threads share the panels of all experts that are taken, one expert's after the other's, a gate's with its
// up's. Many, which experts share unevenly: each expert's.
template <typename S, typename Product>
void gate_up_own_panels(const MoeMatmulArgs& args, const Team& team, ExpertProducts<Product>& products) {
  const auto finish = [&args](const ExpertSums& made) {
    args.gated ? store_gated<S>(args, made) : store_activated<S>(args, made);
  };
  const int64_t together = args.gated ? 2 : 1;  // panels that make columns of y
  if (args.rows > Product::kFewRows) {
    const Team::Range mine = team.share(args.num_panels / together);
    for (int64_t e = 0; e < args.experts; ++e) products.run(e, together * mine.begin, together * mine.end, finish);
    return;
  }
  int64_t taken = 0, first = 0;  // first: number of the expert's first panel
  for (int64_t e = 0; e < args.experts; ++e) taken += products.row_blocks(e) > 0;
  const Team::Range mine = team.share(taken * (args.num_panels / together));
  for (int64_t e = 0; e < args.experts; ++e) {
    if (products.row_blocks(e) == 0) continue;
    const int64_t begin = std::max<int64_t>(together * mine.begin - first, 0);
    products.run(e, begin, std::min(together * mine.end - first, args.num_panels), finish);
    first += args.num_panels;
  }
}

// Blocks of one expert's slots x `panels`, or fewer until there are `wanted` of them.
template <typename S, typename Product>
void gate_up_blocks(const MoeMatmulArgs& args, const Team& team, ExpertProducts<Product>& products, int64_t panels,
                    int64_t wanted) {
  const auto finish = [&args](const ExpertSums& made) {
    args.gated ? store_gated<S>(args, made) : store_activated<S>(args, made);
  };
  int64_t all_blocks = 0;
  for (int64_t e = 0; e < args.experts; ++e) all_blocks += products.row_blocks(e);
  while (all_blocks * ceil_div(args.num_panels, panels) < wanted && panels > 4) panels = ceil_div(panels, 4) * 2;
  const int64_t panel_blocks = ceil_div(args.num_panels, panels);
  const int64_t items = all_blocks * panel_blocks;
  int64_t expert = 0, first = 0;  // first: number of the expert's first block
  for (int64_t item = team.next_of_shares(items); item < items; item = team.next_of_shares(items)) {
    if (item < first) expert = first = 0;  // of another thread's share
    while (item >= first + products.row_blocks(expert) * panel_blocks)
      first += products.row_blocks(expert++) * panel_blocks;
    const int64_t row_blocks = products.row_blocks(expert), panel = (item - first) / row_blocks * panels;
    products.run_block(expert, (item - first) % row_blocks, panel, std::min(panel + panels, args.num_panels), finish);
  }
}

template <typename S, typename Product>
void moe_gate_up(const MoeMatmulArgs& args, const Team& team) {
  ExpertProducts<Product> products(args, args.slots, team);
  switch (share_of(args, Product::kFewRows)) {
    case Share::kOwnPanels:
      return gate_up_own_panels<S>(args, team, products);
    case Share::kBlocks:
      return gate_up_blocks<S>(args, team, products, Product::kMaxPanels, 6 * team.count);
    case Share::kExperts:
      return gate_up_blocks<S>(args, team, products, args.num_panels, team.count);
  }
}

// A thread adds up whole columns of y, expert by expert, so that the order of the sum is the same for any rows.
template <typename S, typename Product>
void moe_down(const MoeMatmulArgs& args, const Team& team) {
  ExpertProducts<Product> products(args, 1, team);
  const auto add_up = [&](int64_t panel, int64_t end) {
    const int64_t col = panel * kPanel, cols = std::min(end * kPanel, args.n) - col;
    for (int64_t row = 0; row < args.rows; ++row) std::fill_n(args.y + row * args.n + col, cols, 0.0f);
    for (int64_t e = 0; e < args.experts; ++e)
      products.run(e, panel, end, [&args](const ExpertSums& made) { add_weighted<S>(args, made); });
  };
  if (share_of(args, Product::kFewRows) == Share::kOwnPanels) {
    const Team::Range mine = team.share(args.num_panels);
    if (mine.begin < mine.end) add_up(mine.begin, mine.end);
    return;
  }
  // Every block prepares all rows, which few panels do not repay, and reads a stretch of each expert's weights.
  constexpr int64_t kPanels = 16;
  int64_t panels = Product::kMaxPanels, blocks = ceil_div(args.num_panels, panels);
  while (blocks < (panels > kPanels ? 6 : 1) * team.count && panels > 2)
    blocks = ceil_div(args.num_panels, panels /= 2);
  for (int64_t block = team.next_of_shares(blocks); block < blocks; block = team.next_of_shares(blocks))
    add_up(block * panels, std::min((block + 1) * panels, args.num_panels));
}

}  // namespace
}  // namespace ingot
