// An engine in memory: bound steps, arena, KV pools; runs one step of the plan per call.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "execution/batch.h"
#include "execution/bind.h"
#include "execution/memory.h"
#include "execution/plan_spec.h"
#include "execution/variants.h"
#include "ranks/rank_group.h"
#include "sampling/sampling.h"
#include "threads/refusing_mutex.h"
#include "threads/threads.h"

namespace ingot {

// Rows of a buffer, copied out after the step that wrote it.
struct Tapped {
  std::string step, buffer;
  int64_t rows, cols;
  std::vector<float> values;
};

struct StepInterrupted {};  // thrown by run when the interruption check said so

// Ahead of src/ingot/step_io.py.
struct AheadView {
  int64_t most_steps;
  double seconds;
  const int32_t* stop;  // other threads write it
};

// With several ranks, each has a session of its own share. The first one is asked for steps, and draws; all others
// follow it, step by step.
//
// Any thread may call anything at any time: all but the delay waits for the step that runs. What a signal handler calls
// in the middle of a step throws std::invalid_argument.
class Session {
 public:
  // `weights` must stay valid and unchanged while the session lives. Throws std::invalid_argument for a plan that is
  // wrong or that this machine cannot run, std::bad_alloc where memory is short, ThreadStartError where threads are.
  // group: the ranks that compute the plan together; null where this one is alone.
  Session(PlanSpec plan, const std::byte* weights, int64_t weight_bytes, int threads, const std::string& isa,
          std::shared_ptr<RankGroup> group = nullptr);

  // Hold a sequence in a slot, and forget it. Throw std::invalid_argument in words.
  void start(int64_t slot, SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt);
  void end(int64_t slot);
  // Executes the plan once and draws tokens; with `ahead` several times, each computing what the one before drew.
  // `interrupted` is asked on the calling thread at least every 100 ms or once per plan step, whatever is longer.
  // Throws std::invalid_argument for a wrong batch, before anything is computed. `logits` may be null, else it receives
  // [logit rows, vocab_size].
  DrawResult run(const BatchView& view, const DrawsView& draws, const std::optional<AheadView>& ahead,
                 const std::function<bool()>& interrupted, std::vector<float>* logits);
  // Of the first of several ranks: gives a batch to the others before it runs, so that earlier pipeline stages compute
  // it while this one ends the steps before. Its `run` must come in the order of announcements. A sequence may be in
  // several steps that are under way, if none but the last one draws for it. Throws as `run`.
  void announce(const BatchView& view, std::span<const int32_t> slots);
  // Computes what has been announced and has not run. Nothing is drawn.
  void settle();
  // For ranks after the first: computes what the first rank's session is asked for, until that closes, but no more than
  // `most_steps`. Throws RankError, StepInterrupted.
  void follow(const std::function<bool()>& interrupted, int64_t most_steps);
  // Draws for the sequences in `slots` from given logits, probabilities from raw ones: both [slots, logit_cols()].
  DrawResult draw(std::span<const int32_t> slots, const float* logits, const float* raw);
  int64_t logit_cols() const { return plan_.limits.vocab_size; }
  void close();  // all but hooks that tell of the last run throws std::invalid_argument from then on

  // From now on every run notes when its calls end. Seconds of each plan step of the last run, 0 of those without a
  // call of their own; then of the draws.
  void time_steps(bool on);
  std::vector<double> step_seconds();
  std::string variant();  // that the last run took
  int64_t barriers();     // of the last run

  // For tests and verification.
  void set_step_delay(double seconds);  // slows every plan step down, from the next one on
  void tap(const std::vector<std::string>& steps);
  std::vector<Tapped> drain_tapped();
  std::vector<int64_t> items_taken();
  std::vector<float> read_buffer(const std::string& name, int64_t rows, int64_t& cols);
  void write_buffer(const std::string& name, const float* values, int64_t rows, int64_t cols);
  void fill_kv(float value);
  // Stored bytes of a block's keys or values in a layer. All throw std::invalid_argument for a layer that is not there,
  // read_kv and write_kv also for another size.
  size_t kv_block_bytes(int64_t layer, bool values) const;
  void read_kv(int64_t layer, int64_t block, bool values, std::span<std::byte> to);
  void write_kv(int64_t layer, int64_t block, bool values, std::span<const std::byte> from);

  // A block of a cache group as it lies in the pool, with all layers of the group. They throw std::invalid_argument for
  // a group or block that is not there, or another size.
  size_t block_bytes(int64_t group) const;
  void read_block(int64_t group, int64_t block, std::span<std::byte> to);
  void write_block(int64_t group, int64_t block, std::span<const std::byte> from);
  // Of the first of several ranks: the same of all ranks, while no announced step is under way. A part for each, by
  // rank, or for each few neighbours that have the same. Throw RankError, too.
  void read_ranks_block(int64_t group, int64_t block, std::span<const std::span<std::byte>> parts);
  void write_ranks_block(int64_t group, int64_t block, std::span<const std::span<const std::byte>> parts);

  int64_t kv_bytes() const;
  int threads() const { return threads_; }

 private:
  // What every call begins with. A handler must not wait for another session either, which may wait for this one's
  // step.
  std::unique_lock<RefusingMutex> lock();
  bool step(const BatchView& view, const DrawsView& draws, const std::function<bool()>& interrupted, bool logits_wanted,
            DrawResult& drawn);
  void find_drafts(const DrawsView& draws);
  void compute_batch(const std::function<bool()>& interrupted);
  void compute_announced();
  std::span<const int32_t> packed_batch();
  BatchView unpacked_batch() const;
  void put_last_tokens(const BatchView& view, std::span<const int32_t> slots);
  template <class Byte>
  std::byte* begin_move(int32_t kind, int64_t group, int64_t block, std::span<const std::span<Byte>> parts);
  bool follow_move();
  void execute(const Team& team);
  void compute(const BoundStep& step, const BoundCall& call, const Team& team);
  const BoundVariant& choose_variant() const;
  void after_step(size_t index);
  void stamp();
  bool pause_or_interrupted();
  bool check_interrupted();
  const BufferSpec& find_buffer(const std::string& name, int64_t rows) const;
  void require_open() const;
  std::byte* kv_block(int64_t layer, int64_t block, bool values, size_t bytes) const;
  std::byte* whole_block(int64_t group, int64_t block, size_t bytes) const;

  PlanSpec plan_;
  std::vector<CacheSizes> kv_sizes_;  // of each cache group
  int threads_;
  Region arena_, shared_;
  std::vector<Region> kv_;  // of each cache group
  Region own_;  // [threads][kPrivateRowElements] floats: what a norm that each thread computes for itself leaves to
                // products
  std::shared_ptr<RankGroup> group_;
  std::vector<int32_t> packed_;                 // the step's batch, as it goes to other ranks
  std::deque<std::vector<int32_t>> announced_;  // that have not run, the oldest first
  Batch batch_;
  std::vector<int32_t> ids_, draw_slots_;  // of the step: its tokens; where the sequences are that draw
  std::vector<int32_t> drafts_;            // of its draws: see Sampler::lay_out
  PlanMemory memory_;
  std::vector<BoundStep> steps_;
  std::vector<BoundVariant> variants_;  // for more and more tokens
  BoundVariant one_by_one_;             // what taps look at, and what runs where no variant is for so many tokens
  const BoundVariant* taken_variant_ = &one_by_one_;  // by the last run
  const Kernel* sample_ = nullptr;
  const float* logits_ = nullptr;
  Sampler sampler_;
  bool hides_;  // log probabilities that nobody wants: its steps may leave out what these need
  SampleArgs sample_args_{};

  RefusingMutex running_;
  std::atomic<double> delay_seconds_{0};
  bool closed_ = false;  // this and all that follows: with `running_` held
  std::set<std::string> taps_;
  std::vector<Tapped> tapped_;
  int64_t barriers_ = 0;
  std::vector<int64_t> taken_;  // of each plan step in the last run: what Team::take gave out before thread 0 was done
  bool timed_ = false;
  std::vector<int64_t> stamps_;  // of the last timed run: its begin, the end of every call, the end of the draws
  const std::function<bool()>* interrupted_ = nullptr;
  int64_t next_check_ns_ = 0;
  LastStep last_step_;
  bool interrupted_late_ = false;  // a step of several ranks, which goes on to its end
};

}  // namespace ingot
