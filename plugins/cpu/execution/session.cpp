#include "execution/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "attention/paged_attention_args.h"
#include "isa/cpu_isa.h"
#include "matmul/matmul_args.h"

namespace ingot {
namespace {

// The kernel that the plan names; null for a pipeline stage without logits.
const Kernel* draw_kernel(const PlanSpec& plan, const std::string& isa) {
  const std::string& name = plan.draw_kernel;
  if (plan.logits.empty() != name.empty())
    throw std::invalid_argument("a plan has logits and a kernel that draws from them, or neither");
  if (name.empty()) return nullptr;
  const Kernel* const kernel = find_kernel(name);
  if (kernel == nullptr) throw std::invalid_argument("this build of ingot has no kernel " + name);
  if (*kernel->args != typeid(SampleArgs)) throw std::invalid_argument("kernel " + name + " draws no tokens");
  if (!isa_includes(isa, kernel->isa()))
    throw std::invalid_argument("kernel " + name + " needs " + std::string(kernel->isa()) + ", this machine offers " +
                                isa);
  return kernel;
}

constexpr int64_t kCheckNs = 100'000'000;
constexpr int32_t kLastDrawn = -1;     // LAST_DRAWN of src/ingot/step_io.py
constexpr size_t kHugeKv = 16u << 20;  // in smaller caches, unused blocks would share large pages with used ones

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

PlanSpec checked(PlanSpec plan) {
  check_plan(plan);
  return plan;
}

size_t shared_bytes(std::vector<BoundStep>& steps, const LimitsSpec& limits, const std::vector<CacheSpec>& caches) {
  Batch largest(limits, caches);
  largest.tokens = limits.max_num_tokens;
  largest.sequences = limits.max_batch_size;
  largest.rows = limits.max_logit_rows;
  largest.table_width = (limits.max_positions + caches[0].tokens_per_block - 1) / caches[0].tokens_per_block;
  size_t bytes = 64;
  for (BoundStep& step : steps) {
    step.set_counts(largest);
    if (step.kernel->scratch != nullptr) bytes = std::max(bytes, step.kernel->scratch(step.args.data()));
  }
  return bytes;
}

// All but the tokens, which may have been left to the session.
bool same_step(const BatchView& one, const BatchView& other) {
  return one.ids.size() == other.ids.size() && std::ranges::equal(one.query_starts, other.query_starts) &&
         std::ranges::equal(one.past_lengths, other.past_lengths) &&
         std::ranges::equal(one.logit_rows, other.logit_rows) && one.table_width == other.table_width &&
         std::ranges::equal(one.block_tables, other.block_tables);
}

void check_ahead(const BatchView& batch, const DrawsView& draws, const AheadView& ahead, bool logits_wanted) {
  if (ahead.most_steps < 1) throw std::invalid_argument("there must be at least one step");
  const size_t count = batch.past_lengths.size();
  bool all = batch.ids.size() == count && batch.logit_rows.size() == count && draws.draws.size() == count;
  for (size_t s = 0; all && s < count; ++s) all = draws.draws[s] == static_cast<int32_t>(s);
  if (!all || draws.known || logits_wanted)
    throw std::invalid_argument(
        "steps follow each other where every sequence has one token, one row of logits and one draw, and nothing else "
        "is wanted");
}

}  // namespace

Session::Session(PlanSpec plan, const std::byte* weights, int64_t weight_bytes, int threads, const std::string& isa,
                 std::shared_ptr<RankGroup> group)
    : plan_(checked(std::move(plan))),
      kv_sizes_(plan_.caches.begin(), plan_.caches.end()),
      threads_(threads),
      arena_(static_cast<size_t>(plan_.arena_bytes), static_cast<size_t>(plan_.arena_bytes) >= kHugePage),
      group_(std::move(group)),
      batch_(plan_.limits, plan_.caches),
      sampler_(plan_.limits.max_batch_size, plan_.limits.vocab_size),
      hides_(std::ranges::any_of(plan_.inputs, [](const InputSpec& each) { return each.name == "whole_rows"; })) {
  if (threads < 1 || threads > ThreadPool::kMaxThreads)
    throw std::invalid_argument("threads must be 1 to " + std::to_string(ThreadPool::kMaxThreads));
  if (!offers_isa(isa)) throw std::invalid_argument("this machine does not offer " + isa);
  memory_ = {weights, weight_bytes, arena_.data(), {}, isa, group_.get()};
  for (const CacheSizes& sizes : kv_sizes_) {
    kv_.emplace_back(static_cast<size_t>(sizes.total), static_cast<size_t>(sizes.total) >= kHugeKv);
    memory_.kv.push_back(kv_.back().data());
  }
  place_meetings(plan_, memory_);
  steps_ = bind_steps(plan_, plan_.steps, memory_, batch_);
  variants_ = bind_variants(plan_, steps_);
  one_by_one_ = one_by_one(plan_, steps_.size());
  taken_.resize(steps_.size());
  shared_ = Region(shared_bytes(steps_, plan_.limits, plan_.caches), false);
  own_ = Region(static_cast<size_t>(threads) * kPrivateRowElements * sizeof(float), false);
  sample_ = draw_kernel(plan_, isa);
  if (!plan_.logits.empty())
    logits_ = reinterpret_cast<const float*>(arena_.data() + find_buffer(plan_.logits, 0).offset);
  ThreadPool::instance().start(threads);
}

std::unique_lock<RefusingMutex> Session::lock() {
  ThreadPool::instance().require_outside();
  return std::unique_lock(running_);
}

void Session::start(int64_t slot, SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt) {
  const auto held = lock();
  require_open();
  sampler_.start(slot, std::move(rules), tokens, num_prompt);
}

void Session::end(int64_t slot) {
  const auto held = lock();
  require_open();
  sampler_.end(slot);
}

DrawResult Session::run(const BatchView& view, const DrawsView& draws, const std::optional<AheadView>& ahead,
                        const std::function<bool()>& interrupted, std::vector<float>* logits) {
  const auto held = lock();
  require_open();
  if (logits_ == nullptr) throw std::invalid_argument("only the last pipeline stage gives logits");
  if (ahead && !announced_.empty()) throw std::invalid_argument("an announced step runs by itself");
  if (ahead) check_ahead(view, draws, *ahead, logits != nullptr);
  DrawResult drawn;
  bool ended = step(view, draws, interrupted, logits != nullptr, drawn);
  if (logits != nullptr) logits->assign(logits_, logits_ + batch_.rows * logit_cols());
  if (!ahead) return drawn;
  std::vector<int32_t> past(view.past_lengths.begin(), view.past_lengths.end());
  const std::vector<int32_t> last_drawn(past.size(), kLastDrawn);
  BatchView next = view;
  next.past_lengths = past;
  next.ids = last_drawn;
  const int64_t begin = now_ns();
  while (!ended && drawn.steps < ahead->most_steps && static_cast<double>(now_ns() - begin) < 1e9 * ahead->seconds &&
         __atomic_load_n(ahead->stop, __ATOMIC_ACQUIRE) == 0) {
    for (int32_t& length : past) ++length;
    ended = step(next, draws, interrupted, false, drawn);
  }
  return drawn;
}

// Adds what the step draws to `drawn`; whether a sequence has ended with it.
bool Session::step(const BatchView& view, const DrawsView& draws, const std::function<bool()>& interrupted,
                   bool logits_wanted, DrawResult& drawn) {
  BatchView complete = view;
  if (announced_.empty()) {
    put_last_tokens(view, draws.slots);
    complete.ids = ids_;
  } else {
    packed_ = announced_.front();
    complete = unpacked_batch();
    if (!same_step(complete, view)) throw std::invalid_argument("steps run in the order in which they were announced");
  }
  batch_.assign(complete);
  if (draws.slots.size() != view.past_lengths.size())
    throw std::invalid_argument("slots must have one entry per sequence");
  find_drafts(draws);
  sampler_.lay_out(draws.draws, draw_slots_, draws.known, batch_.rows, drafts_);
  if (hides_ && !logits_wanted && taps_.empty()) sampler_.leave_best_only(batch_.whole_rows);
  sample_args_ = sampler_.arguments(logits_, drawn);
  if (group_ != nullptr && announced_.empty()) group_->announce(packed_batch());
  if (!announced_.empty()) announced_.pop_front();
  if (group_ != nullptr) group_->begin_step();
  compute_batch(interrupted);
  return sampler_.record(drawn, hides_);  // whatever this step has left out
}

// Where the sequences of all draws are, and which draws are from the rows of drafts: those of the last tokens of a
// sequence, behind its first draw.
void Session::find_drafts(const DrawsView& draws) {
  draw_slots_.clear();
  drafts_.clear();
  for (size_t q = 0; q < draws.draws.size(); ++q) {
    const int32_t row = draws.draws[q];
    if (row < 0 || row >= batch_.rows)
      throw std::invalid_argument("the row of a draw is " + std::to_string(row) + ", expected 0 to " +
                                  std::to_string(batch_.rows - 1));
    const int32_t token = batch_.logit_rows[row], sequence = batch_.sequence_of[token];
    const auto neighbours = [&](int32_t before) {  // the draws from this row and the next one
      return before + 1 < batch_.rows && batch_.logit_rows[before] + 1 == batch_.logit_rows[before + 1] &&
             batch_.sequence_of[batch_.logit_rows[before]] == sequence &&
             batch_.sequence_of[batch_.logit_rows[before + 1]] == sequence;
    };
    const bool follows = q > 0 && draws.draws[q - 1] + 1 == row && neighbours(row - 1);
    const bool goes_on = q + 1 < draws.draws.size() && draws.draws[q + 1] == row + 1 && neighbours(row);
    if (follows && !goes_on && token + 1 != batch_.query_starts[sequence + 1])
      throw std::invalid_argument("a sequence draws from the rows of its last tokens, in order");
    draw_slots_.push_back(draws.slots[static_cast<size_t>(sequence)]);
    drafts_.push_back(follows ? batch_.ids[token] : -1);
  }
}

// All steps of the plan, and the draws.
void Session::compute_batch(const std::function<bool()>& interrupted) {
  for (BoundStep& step : steps_) step.set_counts(batch_);
  taken_variant_ = &choose_variant();
  interrupted_ = &interrupted;
  next_check_ns_ = now_ns() + kCheckNs;
  last_step_.reset();
  interrupted_late_ = false;
  stamps_.clear();
  stamp();
  ThreadPool::instance().run(
      threads_, [](void* self, const Team& team) { static_cast<Session*>(self)->execute(team); }, this);
  stamp();
  if (group_ != nullptr && group_->failed()) throw RankError(group_->failure());
  if (last_step_.decided() || interrupted_late_) throw StepInterrupted{};
}

void Session::announce(const BatchView& view, std::span<const int32_t> slots) {
  const auto held = lock();
  require_open();
  if (group_ == nullptr || group_->rank() != 0 || group_->stages() == 1)
    throw std::invalid_argument("steps are announced to the stages before the last, by rank 0");
  if (std::ssize(announced_) == group_->stages()) throw std::invalid_argument("too many steps are under way");
  put_last_tokens(view, slots);
  BatchView complete = view;
  complete.ids = ids_;
  batch_.assign(complete);
  group_->announce(packed_batch());
  announced_.push_back(packed_);
}

void Session::settle() {
  const auto held = lock();
  require_open();
  compute_announced();
}

void Session::compute_announced() {
  while (!announced_.empty()) {
    packed_ = announced_.front();
    announced_.pop_front();
    batch_.assign(unpacked_batch());
    sampler_.lay_out({}, {}, std::nullopt, batch_.rows);
    group_->begin_step();
    compute_batch([] { return false; });
  }
}

void Session::follow(const std::function<bool()>& interrupted, int64_t most_steps) {
  const auto held = lock();
  require_open();
  if (group_ == nullptr || group_->rank() == 0) throw std::invalid_argument("only ranks after the first follow it");
  try {
    for (int64_t step = 0; step < most_steps; ++step) {
      const NextStep next = group_->next_step(packed_, interrupted);
      if (next == NextStep::kInterrupted) throw StepInterrupted{};
      if (next == NextStep::kNone) return;
      if (follow_move()) continue;
      batch_.assign(unpacked_batch());
      sampler_.lay_out({}, {}, std::nullopt, batch_.rows);
      compute_batch(interrupted);
    }
  } catch (const std::invalid_argument& error) {
    group_->fail("rank " + std::to_string(group_->rank()) + " refuses a step: " + error.what());
    throw RankError(group_->failure());
  }
}

std::span<const int32_t> Session::packed_batch() {
  packed_.clear();
  const auto count = [](auto n) { return static_cast<int32_t>(n); };
  const auto append = [this](const std::vector<int32_t>& from, int64_t n) {
    packed_.insert(packed_.end(), from.begin(), from.begin() + n);
  };
  packed_ = {count(batch_.tokens), count(batch_.sequences), count(batch_.rows), count(batch_.table_width)};
  append(batch_.ids, batch_.tokens);
  append(batch_.query_starts, batch_.sequences + 1);
  append(batch_.past_lengths, batch_.sequences);
  append(batch_.logit_rows, batch_.rows);
  append(batch_.block_tables, std::ssize(batch_.block_tables));
  return packed_;
}

BatchView Session::unpacked_batch() const {
  constexpr size_t kSizes = 4;
  size_t at = kSizes;
  const auto taken = [&](int64_t n) {
    const auto size = static_cast<size_t>(n);
    if (n < 0 || size > packed_.size() - at) throw std::invalid_argument("the batch of a step is cut off");
    at += size;
    return std::span<const int32_t>(packed_).subspan(at - size, size);
  };
  if (packed_.size() < kSizes) throw std::invalid_argument("the batch of a step is cut off");
  BatchView view;
  view.ids = taken(packed_[0]);
  view.query_starts = taken(int64_t{packed_[1]} + 1);
  view.past_lengths = taken(packed_[1]);
  view.logit_rows = taken(packed_[2]);
  view.table_width = packed_[3];
  view.block_tables = std::span<const int32_t>(packed_).subspan(at);
  return view;
}

// The tokens of a step, with what sequences drew last where its batch leaves that to the session.
void Session::put_last_tokens(const BatchView& view, std::span<const int32_t> slots) {
  ids_.assign(view.ids.begin(), view.ids.end());
  for (size_t s = 0; s < std::min(slots.size(), view.query_starts.size()); ++s) {
    const int64_t first = view.query_starts[s];
    if (first >= 0 && first < static_cast<int64_t>(ids_.size()) && ids_[static_cast<size_t>(first)] == kLastDrawn)
      ids_[static_cast<size_t>(first)] = sampler_.last_token(slots[s]);
  }
}

DrawResult Session::draw(std::span<const int32_t> slots, const float* logits, const float* raw) {
  const auto held = lock();
  require_open();
  if (sample_ == nullptr) throw std::invalid_argument("only the last pipeline stage draws tokens");
  std::vector<int32_t> rows(slots.size());
  std::iota(rows.begin(), rows.end(), 0);
  sampler_.lay_out(rows, slots, std::nullopt, static_cast<int64_t>(rows.size()));
  sampler_.draw_from(logits);
  DrawResult drawn;
  sample_args_ = sampler_.arguments(raw, drawn);
  ThreadPool::instance().run(
      threads_,
      [](void* self, const Team& team) {
        const auto* session = static_cast<const Session*>(self);
        session->sample_->run(&session->sample_args_, team);
      },
      this);
  sampler_.record(drawn, hides_);
  return drawn;
}

// On every thread of the pool.
void Session::execute(const Team& team) {
  Team mine = team;
  mine.shared = shared_.data();
  const std::vector<BoundCall>& calls = taken_variant_->calls;
  const int64_t barriers = ThreadPool::instance().barriers();
  bool stop = false;
  for (const BoundCall& call : calls) {
    const BoundStep& step = steps_[call.step];
    // a chunk in the middle of a prompt needs no logits; kernels count on at least one row
    if (batch_.rows > 0 || !step.counts_logits) compute(step, call, mine);
    if (team.index == 0) {
      if (group_ != nullptr) group_->beat();
      taken_[call.step] = team.items_taken();
      const bool asked = pause_or_interrupted();
      interrupted_late_ = interrupted_late_ || (asked && group_ != nullptr);  // the other ranks are in the step, too
      stop = (group_ == nullptr ? asked : group_->failed()) || stop;
    }
    if (call.waits && last_step_.passed(team, call.step, stop)) return;
    if (taps_.contains(step.name)) {
      if (team.index == 0) after_step(call.step);
      team.barrier();  // the next step may overwrite what is being copied
    }
    if (team.index == 0) stamp();
  }
  if (sampler_.count() > 0) sample_->run(&sample_args_, mine);
  if (team.index == 0) barriers_ = ThreadPool::instance().barriers() - barriers;
}

const BoundVariant& Session::choose_variant() const {
  const auto fits = [this](const BoundVariant& each) { return batch_.tokens <= each.most_tokens; };
  const auto found = taps_.empty() ? std::ranges::find_if(variants_, fits) : variants_.end();
  return found == variants_.end() ? one_by_one_ : *found;
}

void Session::compute(const BoundStep& step, const BoundCall& call, const Team& team) {
  auto* own = reinterpret_cast<float*>(own_.data()) + team.index * kPrivateRowElements;
  const auto run = [&](auto args) { step.kernel->run(&args, team); };
  if (call.norm) {
    MatmulArgs product = *step.args.as<MatmulArgs>();
    product.norm = &*call.norm;
    run(product);
  } else if (call.kv_only) {
    RopeKvWriteArgs write = *step.args.as<RopeKvWriteArgs>();
    write.q = nullptr;
    run(write);
  } else if (call.rope) {
    PagedAttentionArgs attention = *step.args.as<PagedAttentionArgs>();
    attention.rope = &*call.rope;
    run(attention);
  } else if (call.own) {
    NormArgs norm = *step.args.as<NormArgs>();
    norm.y = own;
    norm.own = true;
    run(norm);
  } else if (call.private_rows) {
    step.args.run_on(own, *step.kernel, team);
  } else {
    step.kernel->run(step.args.data(), team);
  }
}

void Session::stamp() {
  if (timed_) stamps_.push_back(now_ns());
}

void Session::time_steps(bool on) {
  const auto held = lock();
  timed_ = on;
  stamps_.clear();
}

std::vector<double> Session::step_seconds() {
  const auto held = lock();
  if (stamps_.empty()) return {};
  const std::vector<BoundCall>& calls = taken_variant_->calls;
  std::vector<double> seconds(plan_.steps.size() + 1);
  for (size_t i = 1; i < stamps_.size(); ++i)
    seconds[i <= calls.size() ? calls[i - 1].step : plan_.steps.size()] =
        1e-9 * static_cast<double>(stamps_[i] - stamps_[i - 1]);
  return seconds;
}

int64_t Session::barriers() {
  const auto held = lock();
  return barriers_;
}

std::vector<int64_t> Session::items_taken() {
  const auto held = lock();
  return taken_;
}

std::string Session::variant() {
  const auto held = lock();
  return taken_variant_->name;
}

bool Session::check_interrupted() {
  next_check_ns_ = now_ns() + kCheckNs;
  return ThreadPool::instance().ask_unpinned(*interrupted_);
}

// Sleeps for the step delay; true where the step is to be abandoned.
bool Session::pause_or_interrupted() {
  const int64_t end = now_ns() + static_cast<int64_t>(delay_seconds_.load() * 1e9);
  for (int64_t now = now_ns();; now = now_ns()) {
    if (now >= next_check_ns_ && check_interrupted()) return true;
    if (now >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Session::after_step(size_t index) {
  for (const BufferSpec* buffer : steps_[index].outputs) {
    const int64_t rows = buffer->rows == "logits" ? batch_.rows : batch_.tokens;
    const auto* begin = reinterpret_cast<const float*>(memory_.at(steps_[index].name, *buffer));
    tapped_.push_back({steps_[index].name, buffer->name, rows, buffer->cols, {begin, begin + rows * buffer->cols}});
  }
}

void Session::require_open() const {
  if (closed_) throw std::invalid_argument("the session is closed");
}

void Session::close() {
  const auto held = lock();
  if (!closed_ && group_ != nullptr && !group_->failed()) {
    try {
      compute_announced();  // the other ranks are in the middle of it
    } catch (const RankError&) {
      closed_ = true;  // as below: nobody waits for the rest
    }
    group_->close();
  }
  closed_ = true;
  memory_ = {};
  steps_.clear();
  kv_.clear();
  for (Region* region : {&arena_, &shared_, &own_}) *region = Region();
  group_.reset();
}

void Session::set_step_delay(double seconds) {
  if (!(seconds >= 0 && seconds <= 3600)) throw std::invalid_argument("a step delay is 0 to 3600 seconds");
  delay_seconds_ = seconds;
}

void Session::tap(const std::vector<std::string>& steps) {
  const auto held = lock();
  if (!steps.empty()) require_open();
  for (const std::string& name : steps)
    if (std::ranges::none_of(steps_, [&name](const BoundStep& step) { return step.name == name; }))
      throw std::invalid_argument("there is no kernel call " + name);
  taps_ = {steps.begin(), steps.end()};
  tapped_.clear();
}

std::vector<Tapped> Session::drain_tapped() {
  const auto held = lock();
  return std::exchange(tapped_, {});
}

const BufferSpec& Session::find_buffer(const std::string& name, int64_t rows) const {
  for (const BufferSpec& buffer : plan_.buffers) {
    if (buffer.name != name) continue;
    if (rows < 0 || rows > buffer_rows(plan_, buffer))
      throw std::invalid_argument("buffer " + name + " has fewer rows");
    return buffer;
  }
  throw std::invalid_argument("there is no buffer " + name);
}

std::vector<float> Session::read_buffer(const std::string& name, int64_t rows, int64_t& cols) {
  const auto held = lock();
  require_open();
  const BufferSpec& buffer = find_buffer(name, rows);
  cols = buffer.cols;
  const auto* begin = reinterpret_cast<const float*>(arena_.data() + buffer.offset);
  return {begin, begin + rows * cols};
}

void Session::write_buffer(const std::string& name, const float* values, int64_t rows, int64_t cols) {
  const auto held = lock();
  require_open();
  const BufferSpec& buffer = find_buffer(name, rows);
  if (cols != buffer.cols)
    throw std::invalid_argument("buffer " + name + " has " + std::to_string(buffer.cols) + " columns");
  std::memcpy(arena_.data() + buffer.offset, values, static_cast<size_t>(rows * cols) * sizeof(float));
}

}  // namespace ingot
