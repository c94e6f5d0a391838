// Where the threads of a session wait for each other between the steps of a plan, and where norms are computed and
// queries turned.
//
//   many rows          norm+qkv | rope_kv_write | attention | out | norm+gate_up | down |     | = a barrier
//   few rows    norm        qkv | rope_kv_write | attention | out | norm   gate_up | down |
//
// A barrier stands between two steps if one writes what the other reads or writes, or if both use what the team shares:
// its scratch and the numbers that it gives out. A norm of few rows that only products read is computed by every thread
// into memory of its own, all rows, so that the products need not wait for it. A norm of many rows that one product
// reads which prepares its rows is computed there, row by row: what is normed neither goes to memory nor comes back.
// For many rows, too, attention turns the queries that it loads, and rope_kv_write only keys and values, where what it
// reads lies apart from what attention writes, and no norm takes several heads of a token together.
#pragma once

#include <optional>
#include <vector>

#include "execution/bind.h"

namespace ingot {

struct Turn {
  bool waits = true;                // a barrier follows the step
  bool own = false;                 // a norm that every thread computes into its own memory
  bool takes_own = false;           // a product whose x is there
  bool left_out = false;            // a norm that a product computes
  std::optional<RowNorm> norm;      // of such a product
  size_t normed = 0;                // the step that it computes
  bool keys_only = false;           // rope_kv_write without queries, which the next step turns
  std::optional<RopeQueries> rope;  // of such an attention
};

struct Schedules {
  std::vector<Turn> many, few;  // a Turn per step; the last step's barrier is always there
  int64_t few_tokens = 0;       // steps of more tokens take `many`
};

Schedules make_schedules(const PlanSpec& plan, const std::vector<BoundStep>& steps);

}  // namespace ingot
