#include "execution/schedule.h"

#include <algorithm>

namespace ingot {
namespace {

struct Bytes {
  int64_t begin, end;  // of the arena
};

// What a step reads and writes, and whether it uses the scratch and the numbers that a team shares.
struct Access {
  std::vector<Bytes> reads, writes;
  bool teams_up;
};

class TurnMaker {
 public:
  TurnMaker(const PlanSpec& plan, const std::vector<BoundStep>& steps) : plan_(plan), steps_(steps) {}

  std::vector<Turn> many() const {
    std::vector<Turn> turns(steps_.size());
    for (size_t i = 0; i < steps_.size(); ++i) {
      const std::vector<size_t> products = readers(i);
      if (products.size() != 1 || !computes(products.front(), i)) continue;
      turns[i].left_out = true;
      turns[products.front()].norm = RowNorm{steps_[i].kernel->run, std::get<NormArgs>(steps_[i].args)};
      turns[products.front()].normed = i;
    }
    for (size_t i = 0; i + 1 < steps_.size(); ++i) {
      if (!leaves_queries(i)) continue;
      turns[i].keys_only = true;
      turns[i + 1].rope = RopeQueries{steps_[i].kernel->run, std::get<RopeKvWriteArgs>(steps_[i].args)};
    }
    place_barriers(turns);
    return turns;
  }

  std::vector<Turn> few() const {
    std::vector<Turn> turns(steps_.size());
    for (size_t i = 0; i < steps_.size(); ++i) {
      const std::vector<size_t> products = readers(i);
      turns[i].own = !products.empty();
      for (const size_t product : products) turns[product].takes_own = true;
    }
    place_barriers(turns);
    return turns;
  }

 private:
  Bytes bytes(const BufferSpec* buffer) const {
    return {buffer->offset, buffer->offset + buffer_rows(plan_, *buffer) * buffer->cols * int64_t{sizeof(float)}};
  }
  static bool meet(const Bytes& a, const Bytes& b) { return a.begin < b.end && b.begin < a.end; }
  static bool meet(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
    return std::ranges::any_of(
        a, [&b](const Bytes& x) { return std::ranges::any_of(b, [&x](const Bytes& y) { return meet(x, y); }); });
  }
  bool touches(const std::vector<const BufferSpec*>& buffers, const BufferSpec* other) const {
    return std::ranges::any_of(buffers, [&](const BufferSpec* each) { return meet(bytes(each), bytes(other)); });
  }

  // The products that read norm i and are all that do, before another norm may take its place; none if there are
  // others.
  std::vector<size_t> readers(size_t i) const {
    const auto* norm = std::get_if<NormArgs>(&steps_[i].args);
    if (norm == nullptr || norm->sum != nullptr) return {};
    const BufferSpec* y = steps_[i].outputs.front();
    std::vector<size_t> readers;
    bool taken = false;
    for (size_t j = i + 1; j < steps_.size(); ++j) {
      const BoundStep& step = steps_[j];
      if (touches(step.inputs, y)) {
        const bool product =
            std::holds_alternative<MatmulArgs>(step.args) || std::holds_alternative<MoeMatmulArgs>(step.args);
        const bool as_x = step.inputs.front() == y && !touches({step.inputs.begin() + 1, step.inputs.end()}, y);
        if (taken || !product || !as_x) return {};
        readers.push_back(j);
      }
      if (touches(step.outputs, y)) return readers;
      taken = taken || std::holds_alternative<NormArgs>(step.args);
    }
    return y->name == plan_.logits ? std::vector<size_t>{} : readers;
  }

  // Whether product j may compute norm i: it prepares rows, and until it does, what is to be normed stays as it is.
  bool computes(size_t j, size_t i) const {
    const NormArgs& norm = std::get<NormArgs>(steps_[i].args);
    if (!std::holds_alternative<MatmulArgs>(steps_[j].args) || steps_[j].kernel->scratch == nullptr) return false;
    if (norm.residual != nullptr || j + 1 == steps_.size()) return false;  // a screen reads the last product's x
    for (size_t k = i + 1; k <= j; ++k)
      if (touches(steps_[k].outputs, steps_[i].inputs.front())) return false;
    return true;
  }

  // Whether step i writes keys whose queries the next step may turn: an attention, which alone reads them and leaves
  // what they are made of as it is.
  bool leaves_queries(size_t i) const {
    const BoundStep &write = steps_[i], &attention = steps_[i + 1];
    const auto* args = std::get_if<RopeKvWriteArgs>(&write.args);
    if (args == nullptr || !std::holds_alternative<PagedAttentionArgs>(attention.args)) return false;
    const BufferSpec* q = write.outputs.front();
    if (attention.inputs.front() != q || (args->q_norm != nullptr && args->q_run != args->kv.head_dim)) return false;
    if (std::ranges::any_of(write.inputs, [&](const BufferSpec* each) { return touches(attention.outputs, each); }))
      return false;
    for (size_t j = i + 2; j < steps_.size(); ++j) {
      if (touches(steps_[j].inputs, q)) return false;
      if (touches(steps_[j].outputs, q)) break;
    }
    return true;
  }

  Access access(size_t i, const Turn& turn) const {
    const BoundStep& step = steps_[i];
    Access access{{}, {}, !shares_by_rows(step)};
    if (turn.norm) access.reads.push_back(bytes(steps_[turn.normed].inputs.front()));
    if (turn.rope)
      for (const BufferSpec* each : steps_[i - 1].inputs) access.reads.push_back(bytes(each));
    const bool made = turn.takes_own || turn.norm || turn.rope;  // the first input, by this thread
    for (const BufferSpec* each : step.inputs)
      if (!made || each != step.inputs.front()) access.reads.push_back(bytes(each));
    if (!turn.own && !turn.keys_only)
      for (const BufferSpec* each : step.outputs) access.writes.push_back(bytes(each));
    return access;
  }

  // Kernels that take nothing from the team but their share of the rows.
  static bool shares_by_rows(const BoundStep& step) {
    return std::holds_alternative<NormArgs>(step.args) || std::holds_alternative<ElementwiseArgs>(step.args) ||
           std::holds_alternative<EmbeddingArgs>(step.args) || std::holds_alternative<GatherRowsArgs>(step.args) ||
           std::holds_alternative<RopeTableArgs>(step.args);
  }

  void place_barriers(std::vector<Turn>& turns) const {
    std::vector<Access> open;  // of the steps since the last barrier
    Turn* before = nullptr;
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (turns[i].left_out) {
        turns[i].waits = false;
        continue;
      }
      const Access next = access(i, turns[i]);
      const bool waits = std::ranges::any_of(open, [&next](const Access& each) {
        return (each.teams_up && next.teams_up) || meet(each.writes, next.reads) || meet(each.reads, next.writes) ||
               meet(each.writes, next.writes);
      });
      if (before != nullptr) before->waits = waits;
      before = &turns[i];
      if (waits) open.clear();
      open.push_back(next);
    }
  }

  const PlanSpec& plan_;
  const std::vector<BoundStep>& steps_;
};

}  // namespace

Schedules make_schedules(const PlanSpec& plan, const std::vector<BoundStep>& steps) {
  const TurnMaker maker(plan, steps);
  Schedules made{maker.many(), maker.few(), 0};
  int64_t widest = 1;
  for (size_t i = 0; i < steps.size(); ++i)
    if (made.few[i].own) widest = std::max(widest, std::get<NormArgs>(steps[i].args).hidden);
  made.few_tokens = kOwnElements / widest;
  return made;
}

}  // namespace ingot
