// The variants of a plan, bound: which steps run for a batch, what they compute along with themselves, and where the
// threads of a session wait for each other. The builder has decided all that (builder/schedule.py). It is checked here,
// because a call that comes too early would read values that are not there yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/rope_kv_write_args.h"
#include "execution/bind.h"
#include "rows/norm_args.h"

namespace ingot {

struct BoundCall {
  size_t step = 0;                                 // of the plan
  bool waits = true;                               // all threads wait behind it
  bool own = false;                                // a norm that every thread computes into its own memory
  bool private_rows = false;                       // a product whose x is there
  bool kv_only = false;                            // rope_kv_write without queries, which a later call rotates
  std::optional<RowNorm> norm = std::nullopt;      // that a product computes itself
  std::optional<RopeQueries> rope = std::nullopt;  // that an attention computes itself
};

struct BoundVariant {
  std::string name;
  int64_t most_tokens = 0;
  std::vector<BoundCall> calls;
};

// Every step by itself, and a barrier behind it.
BoundVariant one_by_one(const PlanSpec& plan, size_t steps);

// Throws std::invalid_argument that names the variant and the step for what is no way to run the steps: one that is
// missing or out of order, computed where that cannot be, or not waited for. steps: of the whole plan, in its order.
std::vector<BoundVariant> bind_variants(const PlanSpec& plan, const std::vector<BoundStep>& steps);

}  // namespace ingot
