#include "execution/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "attention/paged_attention_args.h"
#include "isa/cpu_isa.h"
#include "matmul/matmul_args.h"

namespace ingot {
namespace {

constexpr int64_t kCheckNs = 100'000'000;
constexpr size_t kHugeKv = 16u << 20;  // in smaller caches, unused blocks would share large pages with used ones

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

PlanSpec checked(PlanSpec plan) {
  check_plan(plan);
  return plan;
}

size_t shared_bytes(std::vector<BoundStep>& steps, const LimitsSpec& limits, int64_t block_size) {
  Batch largest(limits, block_size, 0);
  largest.tokens = limits.max_num_tokens;
  largest.sequences = limits.max_batch_size;
  largest.rows = limits.max_logit_rows;
  largest.table_width = (limits.max_positions + block_size - 1) / block_size;
  size_t bytes = 64;
  for (BoundStep& step : steps) {
    step.set_counts(largest);
    if (step.kernel->scratch != nullptr) bytes = std::max(bytes, step.kernel->scratch(step.args.data()));
  }
  return bytes;
}

}  // namespace

Session::Session(PlanSpec plan, const std::byte* weights, int64_t weight_bytes, int threads, const std::string& isa)
    : plan_(checked(std::move(plan))),
      kv_sizes_(plan_.kv),
      threads_(threads),
      arena_(static_cast<size_t>(plan_.arena_bytes), static_cast<size_t>(plan_.arena_bytes) >= kHugePage),
      kv_(static_cast<size_t>(kv_sizes_.total), static_cast<size_t>(kv_sizes_.total) >= kHugeKv),
      batch_(plan_.limits, plan_.kv.tokens_per_block, plan_.kv.num_blocks) {
  if (threads < 1 || threads > ThreadPool::kMaxThreads)
    throw std::invalid_argument("threads must be 1 to " + std::to_string(ThreadPool::kMaxThreads));
  if (!isa_includes(detect_isa(), isa)) throw std::invalid_argument("this machine does not offer " + isa);
  const PlanMemory memory{weights, weight_bytes, arena_.data(), kv_.data(), isa};
  steps_ = bind_steps(plan_, plan_.steps, memory, batch_);
  screen_ = Screen(plan_, memory, batch_);
  variants_ = bind_variants(plan_, steps_);
  one_by_one_ = one_by_one(plan_, steps_.size());
  taken_.resize(steps_.size());
  shared_ =
      Region(std::max(shared_bytes(steps_, plan_.limits, plan_.kv.tokens_per_block), screen_.scratch_bytes()), false);
  own_ = Region(static_cast<size_t>(threads) * kOwnElements * sizeof(float), false);
  sample_ = find_kernel("sample.f32." + std::string(isa == "amx" || isa == "avx512bf16" ? "avx512" : isa));
  if (sample_ == nullptr) throw std::invalid_argument("this build of ingot has no sample kernel for " + isa);
  const BufferSpec& logits = find_buffer(plan_.logits, 0);
  logits_ = reinterpret_cast<const float*>(arena_.data() + logits.offset);
  sample_args_.vocab = logits.cols;
  ThreadPool::instance().start(threads);
}

std::unique_lock<RefusingMutex> Session::lock() {
  ThreadPool::instance().require_outside();
  return std::unique_lock(running_);
}

DrawResult Session::run(const BatchView& view, const DrawView& draws, const std::function<bool()>& interrupted,
                        std::vector<float>* logits) {
  const auto held = lock();
  require_open();
  DrawResult drawn = step(view, draws, interrupted, logits != nullptr);
  if (logits != nullptr) logits->assign(logits_, logits_ + batch_.rows * sample_args_.vocab);
  return drawn;
}

int64_t Session::decode(const BatchView& view, const DrawView& draws, const RepeatView& repeat,
                        const std::function<bool()>& interrupted) {
  const auto held = lock();
  require_open();
  RepeatedDraws repeated(view, draws, repeat);
  std::vector<int32_t> past(view.past_lengths.begin(), view.past_lengths.end());
  BatchView next = view;
  next.past_lengths = past;
  DrawResult drawn;
  const double begin = static_cast<double>(now_ns());
  const auto over = [&] {
    return static_cast<double>(now_ns()) - begin >= 1e9 * repeat.seconds ||
           __atomic_load_n(repeat.stop, __ATOMIC_ACQUIRE) != 0;
  };
  for (int64_t done = 1;; ++done) {
    drawn = step(next, repeated.view(), interrupted);
    if (repeated.take(drawn) || done == repeat.steps || over()) return done;
    __atomic_store_n(repeat.done, static_cast<int32_t>(done), __ATOMIC_RELEASE);
    repeated.advance();
    next.ids = drawn.ids;
    for (int32_t& length : past) ++length;
  }
}

DrawResult Session::step(const BatchView& view, const DrawView& draws, const std::function<bool()>& interrupted,
                         bool logits_wanted) {
  batch_.assign(view);
  draws_.assign(draws, batch_.rows, sample_args_.vocab);
  for (BoundStep& step : steps_) step.set_counts(batch_);
  taken_variant_ = &choose_variant();
  screening_ = screen_.takes(batch_) && draws_.only_best() && !logits_wanted && taps_.empty();
  if (screening_) screen_.set_counts(batch_);
  DrawResult drawn;
  sample_args_.logits = logits_;
  draws_.bind(sample_args_, drawn);
  interrupted_ = &interrupted;
  next_check_ns_ = now_ns() + kCheckNs;
  last_step_.reset();
  stamps_.clear();
  stamp();
  ThreadPool::instance().run(
      threads_, [](void* self, const Team& team) { static_cast<Session*>(self)->execute(team); }, this);
  stamp();
  if (last_step_.decided()) throw StepInterrupted{};
  if (screen_.exists()) draws_.hide_log_probs(drawn);  // whichever way the step has gone
  return drawn;
}

DrawResult Session::draw(const float* logits, int64_t rows, const DrawView& draws) {
  const auto held = lock();
  require_open();
  draws_.assign(draws, rows, sample_args_.vocab);
  DrawResult drawn;
  sample_args_.logits = logits;
  draws_.bind(sample_args_, drawn);
  ThreadPool::instance().run(
      threads_,
      [](void* self, const Team& team) {
        const auto* session = static_cast<const Session*>(self);
        session->sample_->run(&session->sample_args_, team);
      },
      this);
  if (screen_.exists()) draws_.hide_log_probs(drawn);
  return drawn;
}

// On every thread of the pool.
void Session::execute(const Team& team) {
  Team mine = team;
  mine.shared = shared_.data();
  const std::vector<BoundCall>& calls = taken_variant_->calls;
  const int64_t barriers = ThreadPool::instance().barriers();
  bool stop = false, decided = false;
  for (const BoundCall& call : calls) {
    const BoundStep& step = steps_[call.step];
    // a chunk in the middle of a prompt needs no logits; kernels count on at least one row
    decided = screening_ && &call == &calls.back() && screen(call, mine);
    if (!decided && (batch_.rows > 0 || !step.counts_logits)) compute(step, call, mine);
    if (team.index == 0) {
      taken_[call.step] = team.taken();
      stop = pause_or_interrupted() || stop;
    }
    if (call.waits && last_step_.passed(team, call.step, stop)) return;
    if (taps_.contains(step.name)) {
      if (team.index == 0) after_step(call.step);
      team.barrier();  // the next step may overwrite what is being copied
    }
    if (team.index == 0) stamp();
  }
  if (draws_.count() > 0 && !decided) sample_->run(&sample_args_, mine);
  for (int64_t q = 0; decided && team.index == 0 && q < draws_.count(); ++q)
    sample_args_.ids[q] = screen_.token(sample_args_.row[q]);
  if (team.index == 0) barriers_ = ThreadPool::instance().barriers() - barriers;
}

const BoundVariant& Session::choose_variant() const {
  const auto fits = [this](const BoundVariant& each) { return batch_.tokens <= each.most_tokens; };
  const auto found = taps_.empty() ? std::ranges::find_if(variants_, fits) : variants_.end();
  return found == variants_.end() ? one_by_one_ : *found;
}

// In place of the last step; whether every row was decided.
bool Session::screen(const BoundCall& call, const Team& team) {
  compute(screen_.product(), call, team);
  team.barrier();
  compute(screen_.choice(), call, team);
  team.barrier();
  if (team.index == 0) screen_.count();
  return screen_.decided();
}

void Session::compute(const BoundStep& step, const BoundCall& call, const Team& team) {
  auto* own = reinterpret_cast<float*>(own_.data()) + team.index * kOwnElements;
  const auto run = [&](auto args) { step.kernel->run(&args, team); };
  if (call.norm) {
    MatmulArgs product = *step.args.as<MatmulArgs>();
    product.norm = &*call.norm;
    run(product);
  } else if (call.keys_only) {
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
  } else if (call.takes_own) {
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

Screen::Counts Session::screen_counts() {
  const auto held = lock();
  return screen_.counts();
}

std::vector<int64_t> Session::taken() {
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
    const auto* begin = reinterpret_cast<const float*>(arena_.data() + buffer->offset);
    tapped_.push_back({steps_[index].name, buffer->name, rows, buffer->cols, {begin, begin + rows * buffer->cols}});
  }
}

void Session::require_open() const {
  if (closed_) throw std::invalid_argument("the session is closed");
}

void Session::close() {
  const auto held = lock();
  closed_ = true;
  steps_.clear();
  for (Region* region : {&arena_, &kv_, &shared_, &own_}) *region = Region();
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
      throw std::invalid_argument("there is no step " + name);
  taps_ = {steps.begin(), steps.end()};
  tapped_.clear();
}

std::vector<Tapped> Session::take_tapped() {
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

void Session::fill_kv(float value) {
  const auto held = lock();
  require_open();
  if (kv_sizes_.itemsize == 2) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    std::fill_n(reinterpret_cast<uint16_t*>(kv_.data()), kv_.bytes() / 2, static_cast<uint16_t>(bits >> 16));
  } else {  // the scales of an int8 cache lie on multiples of 4; its codes hold the number's bytes
    std::fill_n(reinterpret_cast<float*>(kv_.data()), kv_.bytes() / 4, value);
  }
}

void Session::read_kv(int64_t layer, int64_t block, bool values, std::span<std::byte> to) {
  const auto held = lock();
  std::memcpy(to.data(), kv_block(layer, block, values, to.size()), to.size());
}

void Session::write_kv(int64_t layer, int64_t block, bool values, std::span<const std::byte> from) {
  const auto held = lock();
  std::memcpy(kv_block(layer, block, values, from.size()), from.data(), from.size());
}

std::byte* Session::kv_block(int64_t layer, int64_t block, bool values, size_t bytes) const {
  require_open();
  if (layer < 0 || layer >= plan_.kv.num_layers || block < 0 || block >= plan_.kv.num_blocks)
    throw std::invalid_argument("there is no such KV block");
  if (bytes != kv_block_bytes(values)) throw std::invalid_argument("a KV block has another size");
  return kv_.data() + block * kv_sizes_.block + kv_sizes_.offset(layer, values);
}

}  // namespace ingot
