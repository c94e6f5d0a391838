#include "execution/variants.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "attention/paged_attention_args.h"
#include "execution/binder.h"
#include "matmul/matmul_args.h"
#include "moe/moe_matmul_args.h"

namespace ingot {
namespace {

using Buffers = std::vector<const BufferSpec*>;

// What a call reads and writes, the layer of the KV cache that it uses (where its keys begin), and whether it uses the
// scratch and the numbers that a team shares.
struct Access {
  Buffers reads, writes;
  const std::byte* layer;
  bool writes_kv, teams_up;

  bool shares_kv(const Access& next) const {
    return layer != nullptr && layer == next.layer && (writes_kv || next.writes_kv);
  }
};

// Binds the calls of one variant, and follows which buffers hold their values in memory when each call begins.
class VariantBinder {
 public:
  VariantBinder(const PlanSpec& plan, const std::vector<BoundStep>& steps, const VariantSpec& variant)
      : plan_(plan), steps_(steps), variant_(variant), calls_(steps.size()), inside_(steps.size()) {
    for (size_t i = 0; i < steps.size(); ++i) index_[steps[i].name] = i;
  }

  BoundVariant bind() {
    check(variant_.most_tokens >= 1, "it is for no tokens");
    find_calls();
    BoundVariant bound{variant_.name, variant_.most_tokens, {}};
    for (step_ = 0; step_ < steps_.size(); ++step_)
      if (calls_[step_] != nullptr)
        bound.calls.push_back(bind_call(*calls_[step_]));
      else  // the call that computes it says whether it may
        absent_.insert(absent_.end(), steps_[step_].outputs.begin(), steps_[step_].outputs.end());
    check(bound.calls.back().waits, "no barrier ends it");
    for (const BufferSpec* each : absent_) check(each->name != plan_.logits, "no call writes the logits");
    return bound;
  }

 private:
  void check(bool holds, const std::string& otherwise) const {
    const std::string where = step_ < steps_.size() ? ", kernel call " + steps_[step_].name : "";
    if (!holds) throw std::invalid_argument("variant " + variant_.name + where + ": " + otherwise);
  }

  size_t find_step(const std::string& name) const {
    const auto found = index_.find(name);
    check(found != index_.end(), "there is no kernel call " + name);
    return found->second;
  }

  template <typename Args>
  const Args* args_of(size_t i) const {
    return steps_[i].args.as<Args>();
  }

  bool meet(const BufferSpec* a, const BufferSpec* b) const {
    const auto end = [this](const BufferSpec* each) {
      return each->offset + buffer_rows(plan_, *each) * each->cols * int64_t{sizeof(float)};
    };
    return a->offset < end(b) && b->offset < end(a);
  }
  bool meet(const Buffers& some, const BufferSpec* other) const {
    return std::ranges::any_of(some, [&](const BufferSpec* each) { return meet(each, other); });
  }
  bool meet(const Buffers& some, const Buffers& others) const {
    return std::ranges::any_of(others, [&](const BufferSpec* each) { return meet(some, each); });
  }

  // The call of each step. Every step is called, or computed inside a later call, once; calls have the order of the
  // steps. A rope_kv_write is both where attention rotates its queries.
  void find_calls() {
    size_t next = 0;
    for (const CallSpec& call : variant_.calls) {
      step_ = find_step(call.step);
      check(step_ >= next, "it is called too late, or twice");
      next = step_ + 1;
      calls_[step_] = &call;
      check(call.inside.size() <= 1, "it computes several others");
      for (const std::string& name : call.inside) {
        const size_t other = find_step(name);
        check(other < step_ && !inside_[other], "it computes " + name + ", which is there already, or comes later");
        inside_[other] = true;
      }
    }
    for (step_ = 0; step_ < steps_.size(); ++step_) {
      const bool splits = args_of<RopeKvWriteArgs>(step_) != nullptr;
      const bool called = calls_[step_] != nullptr;
      check(called ? !inside_[step_] || splits : inside_[step_] && !splits, "it is not computed once");
    }
  }

  BoundCall bind_call(const CallSpec& spec) {
    const BoundStep& step = steps_[step_];
    BoundCall call{.step = step_, .waits = spec.waits, .private_rows = spec.reads_private, .kv_only = spec.kv_only};
    check(!spec.kv_only || inside_[step_], "it writes keys and values alone, and no call computes its queries");
    check(spec.kv_only || !inside_[step_], "it computes its queries, and so does another call");
    const auto* write = args_of<RopeKvWriteArgs>(step_);
    const auto* attention = args_of<PagedAttentionArgs>(step_);
    const std::byte* layer = write != nullptr ? write->kv.keys : attention != nullptr ? attention->kv.keys : nullptr;
    Access access{step.inputs, step.outputs, layer, write != nullptr, !find_op(*step.kernel)->shares_by_rows};
    check(spec.inside.empty() || !spec.reads_private, "it makes its rows, and each thread has them for itself");
    if (!spec.inside.empty()) compute_inside(call, find_step(spec.inside[0]), access);
    if (spec.reads_private) check_private_rows(access);
    if (spec.computes_own) compute_own(call);
    if (call.own || call.kv_only) access.writes.clear();
    for (const BufferSpec* each : access.reads)
      check(!meet(absent_, each), "it reads " + each->name + ", which no call has written to memory");
    wait_for(access, spec.waits);
    std::erase_if(absent_, [&](const BufferSpec* each) { return meet(access.writes, each); });
    if (call.own || call.kv_only) absent_.push_back(step.outputs.front());
    return call;
  }

  // This call makes its first input itself, as step `other` would.
  void compute_inside(BoundCall& call, size_t other, Access& access) const {
    const BoundStep &step = steps_[step_], &made = steps_[other];
    const auto* norm = args_of<NormArgs>(other);
    const auto* write = args_of<RopeKvWriteArgs>(other);
    Buffers sources = made.inputs;
    if (norm != nullptr) {
      check(norms_rows(*step.kernel) && norm->residual == nullptr && norm->sum == nullptr,
            "it cannot compute " + made.name + " along with its rows");
      call.norm = RowNorm{made.kernel->run, *norm};
      sources.resize(1);
    } else {
      check(write != nullptr && args_of<PagedAttentionArgs>(step_) != nullptr &&
                (write->q_norm == nullptr || write->q_run == write->kv.head_dim),
            "it cannot compute " + made.name + " along with its queries");
      call.rope = RopeQueries{made.kernel->run, *write};
    }
    check(!step.inputs.empty() && step.inputs.front() == made.outputs.front(), "it does not read what it computes");
    for (size_t between = other + 1; between <= step_; ++between) {
      check(!meet(steps_[between].outputs, sources), "what it makes " + made.name + " of is written over");
      check(!find_op(*steps_[between].kernel)->meets_ranks,
            "what it makes " + made.name + " of may lie in a slot of the ranks, who meet before it");
    }
    access.reads.assign(step.inputs.begin() + 1, step.inputs.end());
    access.reads.insert(access.reads.end(), sources.begin(), sources.end());
  }

  // Its first input lies in the memory of each thread.
  void check_private_rows(Access& access) const {
    check(!access.reads.empty() && access.reads.front() == own_ && std::ranges::count(absent_, own_) > 0,
          "no thread has the rows that it reads for itself");
    check(find_op(*steps_[step_].kernel)->takes_private_rows,
          "its kernel takes no rows from the memory of each thread");
    access.reads.erase(access.reads.begin());
  }

  void compute_own(BoundCall& call) {
    const auto* norm = args_of<NormArgs>(step_);
    check(norm != nullptr && norm->sum == nullptr, "it cannot be computed by each thread for itself");
    check(variant_.most_tokens <= kPrivateRowElements / norm->hidden, "the memory of a thread does not hold its rows");
    call.own = true;
    own_ = steps_[step_].outputs.front();
  }

  // Two calls need a barrier in between if one writes what the other reads or writes, in the arena or in the KV cache,
  // or if both use what the team shares.
  void wait_for(const Access& next, bool waits) {
    for (const Access& each : open_)
      check(!(each.teams_up && next.teams_up) && !meet(each.writes, next.reads) && !meet(each.reads, next.writes) &&
                !meet(each.writes, next.writes) && !each.shares_kv(next),
            "no barrier lies between it and what it has to wait for");
    open_.push_back(next);
    if (waits) open_.clear();
  }

  const PlanSpec& plan_;
  const std::vector<BoundStep>& steps_;
  const VariantSpec& variant_;
  std::map<std::string, size_t> index_;
  std::vector<const CallSpec*> calls_;  // of each step, or null
  std::vector<bool> inside_;            // whether another call computes the step, or its queries
  size_t step_ = SIZE_MAX;              // that is looked at
  Buffers absent_;                      // whose values no call has written to memory
  const BufferSpec* own_ = nullptr;     // what each thread has in its own memory
  std::vector<Access> open_;            // of the calls since the last barrier
};

}  // namespace

BoundVariant one_by_one(const PlanSpec& plan, size_t steps) {
  BoundVariant bound{"", plan.limits.max_num_tokens, {}};
  for (size_t i = 0; i < steps; ++i) bound.calls.push_back({.step = i});
  return bound;
}

std::vector<BoundVariant> bind_variants(const PlanSpec& plan, const std::vector<BoundStep>& steps) {
  std::vector<BoundVariant> bound;
  for (const VariantSpec& variant : plan.variants) {
    bound.push_back(VariantBinder(plan, steps, variant).bind());
    const bool known = bound.size() > 1 && bound[bound.size() - 2].most_tokens >= variant.most_tokens;
    if (known) throw std::invalid_argument("variant " + variant.name + ": those before it take its tokens");
  }
  return bound;
}

}  // namespace ingot
