// From a plan's step to a kernel call: every name, shape, offset and attribute is checked here, once, at open.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "execution/arguments.h"
#include "execution/batch.h"
#include "execution/plan_check.h"
#include "execution/plan_spec.h"
#include "execution/registry.h"
#include "ranks/rank_group.h"

namespace ingot {

struct BoundStep {
  std::string name;
  const Kernel* kernel;
  Arguments args;
  std::vector<const BufferSpec*> inputs, outputs;
  bool counts_logits;  // rows are the step's logit rows, else its tokens
  std::vector<WeightSlice> pieces;
  std::vector<float> scales;         // of rows, copied: in the panels they lie pages apart
  std::array<int32_t, 4> tactics{};  // of a product with 1, 2-8, 9-32 and more rows

  void set_counts(const Batch& batch);  // rows, tokens, block tables
};

// What a plan's offsets point into.
struct PlanMemory {
  const std::byte* weights;
  int64_t weight_bytes;
  std::byte* arena;
  std::vector<std::byte*> kv;  // of each cache group
  std::string isa;             // kernels of higher levels are refused
  RankGroup* group = nullptr;  // of the ranks that compute the plan together

  std::map<std::string, Meeting> meetings = {};                  // by step
  std::map<std::string, Message> messages = {};                  // by step
  std::pair<int64_t, size_t> sends = {0, 0}, receives = {0, 0};  // how many there are, and their bytes
  // What a step finds in a slot of the ranks instead of the arena, by step and buffer: the steps that make what a
  // collective takes write it where the ranks meet, and those that read the sums that it makes may take them there.
  std::map<std::pair<std::string, std::string>, std::byte*> in_slots = {};

  std::byte* at(const std::string& step, const BufferSpec& buffer) const {
    const auto found = in_slots.find({step, buffer.name});
    return found == in_slots.end() ? arena + buffer.offset : found->second;
  }
};

// Finds the meetings and messages of a plan's steps, and what lies in slots.
void place_meetings(const PlanSpec& plan, PlanMemory& memory);

// Throws std::invalid_argument that names the step or buffer and what is wrong.
std::vector<BoundStep> bind_steps(const PlanSpec& plan, const std::vector<StepSpec>& steps, const PlanMemory& memory,
                                  const Batch& batch);

}  // namespace ingot
