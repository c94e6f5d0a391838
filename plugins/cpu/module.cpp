// The Python module ingot._cpu: what this machine offers, the kernel table, checksums, and sessions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include "checksum/crc32.h"
#include "execution/binder.h"
#include "execution/registry.h"
#include "execution/session.h"
#include "execution/variants.h"
#include "isa/cpu_isa.h"
#include "measure/measure_bindings.h"
#include "ranks/mpi_group.h"
#include "ranks/window.h"
#include "threads/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ingot::Session;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using InRows = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InTables = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <typename T>
using OutRows = nb::ndarray<nb::numpy, T, nb::ndim<2>>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using PieceTuple = std::tuple<int64_t, int64_t, int64_t>;
using InputTuple = std::tuple<std::string, std::string, std::string>;
using BufferTuple = std::tuple<std::string, std::string, int64_t, int64_t, std::string>;
using WeightTuple =
    std::tuple<std::string, std::string, std::vector<int64_t>, std::string, int64_t, std::vector<PieceTuple>>;
using StepTuple = std::tuple<std::string, std::string, std::string, std::vector<std::string>, std::vector<std::string>,
                             std::map<std::string, ingot::AttrSpec>>;
using CallTuple = std::tuple<std::string, std::vector<std::string>, bool, bool, bool, bool>;
using VariantTuple = std::tuple<std::string, int64_t, std::vector<CallTuple>>;
using LimitsTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using CacheTuple = std::tuple<int64_t, std::vector<int64_t>, int64_t, int64_t, int64_t, std::string, int64_t,
                              std::vector<int64_t>, int64_t>;

template <typename T>
std::span<const T> span_of(const In<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
Out<T> vector_out(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Out<T>(owned->data(), {owned->size()}, owner);
}

template <typename T>
OutRows<T> rows_out(std::vector<T>&& values, int64_t rows, int64_t cols) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return OutRows<T>(owned->data(), {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner);
}

template <typename Spec, typename Tuple>
std::vector<Spec> specs(const std::vector<Tuple>& tuples) {
  std::vector<Spec> all;
  for (const Tuple& tuple : tuples)
    all.push_back(std::apply([](const auto&... field) { return Spec{field...}; }, tuple));
  return all;
}

std::vector<ingot::WeightSpec> weight_specs(const std::vector<WeightTuple>& tuples) {
  std::vector<ingot::WeightSpec> all;
  for (const auto& [name, dtype, shape, layout, nbytes, pieces] : tuples)
    all.push_back({name, dtype, shape, layout, nbytes, specs<ingot::WeightSliceSpec>(pieces)});
  return all;
}

std::vector<ingot::VariantSpec> variant_specs(const std::vector<VariantTuple>& tuples) {
  std::vector<ingot::VariantSpec> all;
  for (const auto& [name, most_tokens, calls] : tuples)
    all.push_back({name, most_tokens, specs<ingot::CallSpec>(calls)});
  return all;
}

void make_session(Session* self, const Bytes& weights, const std::vector<InputTuple>& inputs,
                  const std::vector<BufferTuple>& buffers, const std::vector<WeightTuple>& weight_tuples,
                  const std::vector<StepTuple>& steps, const std::vector<VariantTuple>& variants,
                  const LimitsTuple& limits, const std::vector<CacheTuple>& caches, int64_t arena_bytes,
                  const std::string& logits, const std::string& draw_kernel, int threads, const std::string& isa,
                  std::shared_ptr<ingot::RankGroup> group) {
  const auto spec = [](const auto&... field) { return ingot::LimitsSpec{field...}; };
  ingot::PlanSpec plan{std::apply(spec, limits),
                       specs<ingot::CacheSpec>(caches),
                       specs<ingot::InputSpec>(inputs),
                       specs<ingot::BufferSpec>(buffers),
                       weight_specs(weight_tuples),
                       specs<ingot::StepSpec>(steps),
                       variant_specs(variants),
                       arena_bytes,
                       logits,
                       draw_kernel};
  const nb::gil_scoped_release release;
  new (self) Session(std::move(plan), reinterpret_cast<const std::byte*>(weights.data()),
                     static_cast<int64_t>(weights.size()), threads, isa, std::move(group));
}

// On the calling thread, which has released the interpreter's lock. Signals reach the first thread alone; the others
// must not wait for the lock, which the thread that handles the tokens may hold.
bool signal_pending() {
  if (gettid() != getpid()) return false;
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Grammar.native of src/ingot/step_io.py.
using GrammarTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t>;
// SequenceRules of src/ingot/step_io.py, in the order of its fields; top, reasoning_begin and
// reasoning_budget: -1 for None.
using RulesTuple = std::tuple<double, int64_t, double, double, uint64_t, double, double, double,
                              std::vector<std::tuple<int32_t, double>>, std::vector<std::vector<int32_t>>,
                              std::vector<std::vector<int32_t>>, std::vector<int32_t>, int64_t, int64_t, bool, int64_t,
                              std::vector<int32_t>, int32_t, int64_t, std::optional<GrammarTuple>>;

template <typename Field>
Field as_rule(const Field& field) {
  return field;
}

std::optional<ingot::NativeGrammar> as_rule(const std::optional<GrammarTuple>& given) {
  if (!given) return std::nullopt;
  return std::apply([](const auto&... field) { return ingot::NativeGrammar{field...}; }, *given);
}

void start(Session& self, int64_t slot, const RulesTuple& fields, const In<int32_t>& tokens, int64_t num_prompt) {
  auto rules = std::apply([](const auto&... field) { return ingot::SequenceRules{as_rule(field)...}; }, fields);
  const nb::gil_scoped_release release;
  self.start(slot, std::move(rules), span_of(tokens), num_prompt);
}

// ids, log_probs, ends, logits, token_ranks, top_ids, top_log_probs
using RunResult =
    std::tuple<OutRows<int32_t>, OutRows<float>, Out<int32_t>, std::optional<OutRows<float>>,
               std::optional<OutRows<int32_t>>, std::optional<OutRows<int32_t>>, std::optional<OutRows<float>>>;

RunResult run_result(ingot::DrawResult&& drawn, const std::optional<OutRows<float>>& logits) {
  const auto by_step = [steps = drawn.steps]<typename T>(std::vector<T>&& values) {
    const auto cols = static_cast<int64_t>(values.size()) / steps;
    return rows_out(std::move(values), steps, cols);
  };
  RunResult result{by_step(std::move(drawn.ids)),
                   by_step(std::move(drawn.log_probs)),
                   vector_out(std::move(drawn.ends)),
                   logits,
                   {},
                   {},
                   {}};
  if (drawn.ranked) {
    std::get<4>(result) = by_step(std::move(drawn.token_ranks));
    std::get<5>(result) = by_step(std::move(drawn.top_ids));
    std::get<6>(result) = by_step(std::move(drawn.top_log_probs));
  }
  return result;
}

// KnownTokens and Ahead of src/ingot/step_io.py, in the order of their fields.
using KnownTuple = std::tuple<In<int32_t>, In<int32_t>, In<int32_t>>;
using AheadTuple = std::tuple<int64_t, double, In<int32_t>>;

RunResult run(Session& self, In<int32_t> ids, In<int32_t> query_starts, In<int32_t> past_lengths,
              const InTables& block_tables, In<int32_t> logit_rows, In<int32_t> slots, In<int32_t> draws,
              const std::optional<KnownTuple>& known, bool want_logits, const std::optional<AheadTuple>& ahead) {
  const ingot::BatchView view{.ids = span_of(ids),
                              .query_starts = span_of(query_starts),
                              .past_lengths = span_of(past_lengths),
                              .block_tables = {block_tables.data(), block_tables.size()},
                              .logit_rows = span_of(logit_rows),
                              .table_width = static_cast<int64_t>(block_tables.shape(2))};
  ingot::DrawsView drawing{.slots = span_of(slots), .draws = span_of(draws), .known = {}};
  if (known)
    drawing.known = std::apply([](const auto&... array) { return ingot::KnownView{span_of(array)...}; }, *known);
  std::optional<ingot::AheadView> going;
  if (ahead) {
    const auto& [most_steps, seconds, stop] = *ahead;
    if (stop.size() != 1) throw std::invalid_argument("stop must have one entry");
    going = {.most_steps = most_steps, .seconds = seconds, .stop = stop.data()};
  }
  ingot::DrawResult drawn;
  std::vector<float> logits;
  const auto rows = static_cast<int64_t>(logit_rows.size());
  try {
    const nb::gil_scoped_release release;
    drawn = self.run(view, drawing, going, signal_pending, want_logits ? &logits : nullptr);
  } catch (const ingot::StepInterrupted&) {
    throw nb::python_error();
  }
  std::optional<OutRows<float>> logits_out;
  if (want_logits) logits_out = rows_out(std::move(logits), rows, self.logit_cols());
  return run_result(std::move(drawn), logits_out);
}

void announce(Session& self, In<int32_t> ids, In<int32_t> query_starts, In<int32_t> past_lengths,
              const InTables& block_tables, In<int32_t> logit_rows, In<int32_t> slots) {
  const ingot::BatchView view{.ids = span_of(ids),
                              .query_starts = span_of(query_starts),
                              .past_lengths = span_of(past_lengths),
                              .block_tables = {block_tables.data(), block_tables.size()},
                              .logit_rows = span_of(logit_rows),
                              .table_width = static_cast<int64_t>(block_tables.shape(2))};
  const std::span<const int32_t> where = span_of(slots);
  const nb::gil_scoped_release release;
  self.announce(view, where);
}

void follow(Session& self, int64_t most_steps) {
  try {
    const nb::gil_scoped_release release;
    self.follow(signal_pending, most_steps);
  } catch (const ingot::StepInterrupted&) {
    throw nb::python_error();
  }
}

RunResult draw(Session& self, In<int32_t> slots, InRows<float> logits, InRows<float> raw) {
  for (const auto* each : {&logits, &raw})
    if (each->shape(0) != slots.size() || static_cast<int64_t>(each->shape(1)) != self.logit_cols())
      throw std::invalid_argument("logits have " + std::to_string(each->shape(0)) + " rows and " +
                                  std::to_string(each->shape(1)) + " columns, expected " +
                                  std::to_string(slots.size()) + " and " + std::to_string(self.logit_cols()));
  ingot::DrawResult drawn;
  {
    const nb::gil_scoped_release release;
    drawn = self.draw(span_of(slots), logits.data(), raw.data());
  }
  return run_result(std::move(drawn), std::nullopt);
}

using TappedTuple = std::tuple<std::string, std::string, OutRows<float>>;

std::vector<TappedTuple> drain_tapped(Session& self) {
  std::vector<ingot::Tapped> tapped;
  {
    const nb::gil_scoped_release release;
    tapped = self.drain_tapped();
  }
  std::vector<TappedTuple> all;
  for (ingot::Tapped& each : tapped)
    all.emplace_back(each.step, each.buffer, rows_out(std::move(each.values), each.rows, each.cols));
  return all;
}

OutRows<float> read_buffer(Session& self, const std::string& name, int64_t rows) {
  int64_t cols = 0;
  std::vector<float> values;
  {
    const nb::gil_scoped_release release;
    values = self.read_buffer(name, rows, cols);
  }
  return rows_out(std::move(values), rows, cols);
}

void write_buffer(Session& self, const std::string& name, const InRows<float>& values) {
  const nb::gil_scoped_release release;
  self.write_buffer(name, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
}

nb::bytes read_kv(Session& self, int64_t layer, int64_t block, bool values) {
  const size_t bytes = self.kv_block_bytes(layer, values);
  auto data = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!data.is_valid()) throw nb::python_error();
  auto* to = reinterpret_cast<std::byte*>(PyBytes_AsString(data.ptr()));
  const nb::gil_scoped_release release;
  self.read_kv(layer, block, values, {to, bytes});
  return data;
}

void write_kv(Session& self, int64_t layer, int64_t block, bool values, const nb::bytes& data) {
  const std::span<const std::byte> from{static_cast<const std::byte*>(data.data()), data.size()};
  const nb::gil_scoped_release release;
  self.write_kv(layer, block, values, from);
}

using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void read_block(Session& self, int64_t group, int64_t block, const WritableBytes& to) {
  const std::span<std::byte> bytes{reinterpret_cast<std::byte*>(to.data()), to.size()};
  const nb::gil_scoped_release release;
  self.read_block(group, block, bytes);
}

void write_block(Session& self, int64_t group, int64_t block, const Bytes& from) {
  const std::span<const std::byte> bytes{reinterpret_cast<const std::byte*>(from.data()), from.size()};
  const nb::gil_scoped_release release;
  self.write_block(group, block, bytes);
}

// A part for each rank.
template <class Byte, class Array>
std::vector<std::span<Byte>> spans_of(const std::vector<Array>& parts) {
  std::vector<std::span<Byte>> spans;
  for (const Array& part : parts) spans.emplace_back(reinterpret_cast<Byte*>(part.data()), part.size());
  return spans;
}

void read_ranks_block(Session& self, int64_t group, int64_t block, const std::vector<WritableBytes>& parts) {
  const auto spans = spans_of<std::byte>(parts);
  const nb::gil_scoped_release release;
  self.read_ranks_block(group, block, spans);
}

void write_ranks_block(Session& self, int64_t group, int64_t block, const std::vector<Bytes>& parts) {
  const auto spans = spans_of<const std::byte>(parts);
  const nb::gil_scoped_release release;
  self.write_ranks_block(group, block, spans);
}

void announce_batch(ingot::RankGroup& self, In<int32_t> batch) {
  const std::span<const int32_t> numbers = span_of(batch);
  const nb::gil_scoped_release release;
  self.announce(numbers);
}

nb::object next_batch(ingot::RankGroup& self) {
  std::vector<int32_t> batch;
  ingot::NextStep next;
  {
    const nb::gil_scoped_release release;
    next = self.next_step(batch, signal_pending);
  }
  if (next == ingot::NextStep::kInterrupted) throw nb::python_error();
  return next == ingot::NextStep::kNone ? nb::none() : nb::cast(vector_out(std::move(batch)));
}

// What waits for the step that runs must not hold the interpreter's lock, which that step asks for.
using Released = nb::call_guard<nb::gil_scoped_release>;

void bind_ranks(nb::module_& m) {
  const nb::exception<ingot::RankError> rank_error(m, "RankError");
  nb::class_<ingot::RankGroup>(m, "RankGroup", "Ranks that compute a model together.")
      .def_prop_ro("rank", &ingot::RankGroup::rank, "Number of this one.")
      .def_prop_ro("count", &ingot::RankGroup::count, "How many there are.")
      .def_prop_ro("failed", &ingot::RankGroup::failed, "Whether no step can follow.")
      .def("fail", &ingot::RankGroup::fail, "words"_a, Released(), "End the steps of all ranks; the first words count.")
      .def("require_all", &ingot::RankGroup::require_all, Released(), "Raises RankError where a rank has ended.")
      .def("beat", &ingot::RankGroup::beat, "Of a rank that is alive: others need not give it up.")
      .def("beats", &ingot::RankGroup::beats, "How often each rank has done so; empty where nobody knows.")
      .def("announce", &announce_batch, "batch"_a.noconvert(), "Of the first rank: give the others a step.")
      .def("begin_step", &ingot::RankGroup::begin_step, Released(), "Of the first rank: with the others of its stage.")
      .def("next_step", &next_batch, "Of the others: the batch of the next step, when it has begun; None: no more.")
      .def("close", &ingot::RankGroup::close, Released(), "Of the first rank: tell the others that no step follows.");
  nb::class_<ingot::MpiGroup, ingot::RankGroup>(m, "MpiGroup", "Ranks of several machines.")
      .def(
          "__init__",
          [](ingot::MpiGroup* self, const std::array<uintptr_t, 8>& calls, int rank, int count, int64_t slot_bytes,
             double timeout, int stages, int64_t message_bytes) {
            const auto given = std::apply([](auto... each) { return ingot::MpiCalls{each...}; }, calls);
            new (self) ingot::MpiGroup(given, rank, count, slot_bytes, timeout, stages, message_bytes);
          },
          "calls"_a, "rank"_a, "count"_a, "slot_bytes"_a, "timeout"_a, "stages"_a, "message_bytes"_a);
  nb::class_<ingot::Window, ingot::RankGroup>(m, "Window", "Ranks of one machine, which share memory.")
      .def(
          "__init__",
          [](ingot::Window* self, const std::string& path, int rank, int count, int64_t slot_bytes, int64_t batch_words,
             double timeout, int stages, int64_t message_bytes) {
            const ingot::WindowShape shape{count, slot_bytes, batch_words, stages, message_bytes};
            new (self) ingot::Window(path, rank, shape, timeout);
          },
          "path"_a, "rank"_a, "count"_a, "slot_bytes"_a, "batch_words"_a, "timeout"_a, "stages"_a, "message_bytes"_a)
      .def_static(
          "bytes",
          [](int count, int64_t slot_bytes, int64_t batch_words, int stages, int64_t message_bytes) {
            return ingot::WindowShape{count, slot_bytes, batch_words, stages, message_bytes}.bytes();
          },
          "count"_a, "slot_bytes"_a, "batch_words"_a, "stages"_a, "message_bytes"_a, "Size of the file.");
}

void bind_session(nb::module_& m) {
  nb::class_<Session>(m, "Session", "A plan bound to its weights, arena and KV pools. Arguments: target.py.")
      .def("__init__", &make_session, "weights"_a.noconvert(), "inputs"_a, "buffers"_a, "weight_specs"_a, "steps"_a,
           "variants"_a, "limits"_a, "caches"_a, "arena_bytes"_a, "logits"_a, "draw_kernel"_a, "threads"_a, "isa"_a,
           "group"_a.none() = nb::none(), nb::keep_alive<1, 2>())
      .def("start", &start, "slot"_a, "rules"_a, "tokens"_a.noconvert(), "num_prompt"_a,
           "Hold a sequence in a slot; its rules are SequenceRules' fields in order.")
      .def("end", &Session::end, "slot"_a, Released(), "Forget the sequence in a slot.")
      .def("announce", &announce, "ids"_a.noconvert(), "query_starts"_a.noconvert(), "past_lengths"_a.noconvert(),
           "block_tables"_a.noconvert(), "logit_rows"_a.noconvert(), "slots"_a.noconvert(),
           "Give a batch to earlier pipeline stages before its run.")
      .def("settle", &Session::settle, Released(), "Compute announced steps that have not run; nothing is drawn.")
      .def("run", &run, "ids"_a.noconvert(), "query_starts"_a.noconvert(), "past_lengths"_a.noconvert(),
           "block_tables"_a.noconvert(), "logit_rows"_a.noconvert(), "slots"_a.noconvert(), "draws"_a.noconvert(),
           "known"_a.noconvert().none(), "want_logits"_a, "ahead"_a.noconvert().none(),
           "One step, or several: the fields of StepResult in order.")
      .def("draw", &draw, "slots"_a.noconvert(), "logits"_a.noconvert(), "raw"_a.noconvert(),
           "The same draws from given logits, with probabilities from raw ones.")
      .def("follow", &follow, "most_steps"_a = std::numeric_limits<int64_t>::max(),
           "Compute the steps of the first rank's session, until that closes, or as many as these.")
      .def("close", &Session::close, Released(), "Free arena and KV pools.")
      .def_prop_ro("kv_bytes", &Session::kv_bytes, "Address space of the KV pools.")
      .def_prop_ro("threads", &Session::threads, "Threads that share each step.")
      .def("set_step_delay", &Session::set_step_delay, "seconds"_a, "Slow every plan step down, for tests.")
      .def_prop_ro("barriers", &Session::barriers, Released(),
                   "How often the threads of the last run waited for each other.")
      .def("time_steps", &Session::time_steps, "on"_a, Released(), "Note in every run when its plan steps end.")
      .def("step_seconds", &Session::step_seconds, Released(),
           "Of each plan step of the last run, 0 without a call of its own; then of the draws.")
      .def_prop_ro("variant", &Session::variant, Released(),
                   "Name of the plan's variant that the last run took; empty: the steps one by one.")
      .def("tap", &Session::tap, "steps"_a, Released(), "Copy the outputs of these plan steps in every run.")
      .def("drain_tapped", &drain_tapped, "Step, buffer and values copied since the last call.")
      .def("items_taken", &Session::items_taken, Released(),
           "Of each plan step in the last run on one thread: how often it took blocks in turn.")
      .def("read_buffer", &read_buffer, "name"_a, "rows"_a, "First rows of an arena buffer.")
      .def("write_buffer", &write_buffer, "name"_a, "values"_a, "Set the first rows of an arena buffer.")
      .def("fill_kv", &Session::fill_kv, "value"_a, Released(), "Set every slot of the KV pools.")
      .def("read_kv", &read_kv, "layer"_a, "block"_a, "values"_a, "Stored bytes of a block's keys or values.")
      .def("write_kv", &write_kv, "layer"_a, "block"_a, "values"_a, "data"_a, "Set a block's keys or values.")
      .def("block_bytes", &Session::block_bytes, "group"_a, "Of a block of a cache group, with all its layers.")
      .def("read_block", &read_block, "group"_a, "block"_a, "to"_a, "Copy a block of a cache group.")
      .def("write_block", &write_block, "group"_a, "block"_a, "data"_a, "Set a block of a cache group.")
      .def("read_ranks_block", &read_ranks_block, "group"_a, "block"_a, "parts"_a,
           "Copy a block of all ranks, of which this is the first.")
      .def("write_ranks_block", &write_ranks_block, "group"_a, "block"_a, "parts"_a, "Set a block of all ranks.");
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "Kernels and sessions of the CPU targets; used through ingot.plugins.cpu.target.";
  ingot::require_registrations();
  const nb::exception<ingot::ThreadStartError> thread_start_error(m, "ThreadStartError");
  m.def(
      "isa_levels",
      [] {
        std::vector<std::tuple<std::string, std::string, bool>> levels;
        for (const ingot::IsaLevel& level : ingot::isa_levels())
          levels.emplace_back(level.name, level.base, ingot::offers_isa(level.name));
        return levels;
      },
      "Levels of instructions, the preferred one first: name, the level that it stands on, whether it is here.");
  m.def(
      "cores",
      [] {
        std::vector<std::tuple<int, int>> cores;
        for (const ingot::Cpu& cpu : ingot::ThreadPool::instance().cpus()) cores.emplace_back(cpu.number, cpu.node);
        return cores;
      },
      "CPU and memory node of each core that this process may use, in the order of threads.");
  // A process may end while a daemon thread is inside a step: what that thread holds then is nobody's mistake.
  nb::set_leak_warnings(false);
  m.def(
      "kernel_names",
      [] {
        std::vector<std::string> names;
        for (const ingot::Kernel& kernel : ingot::kernel_table()) names.emplace_back(kernel.name);
        return names;
      },
      "Names of all compiled kernels, sorted, whatever this machine can run.");
  m.def(
      "registration_problem",
      [](const std::string& name, const std::string& like) {
        const ingot::Kernel* const found = ingot::find_kernel(like);
        if (found == nullptr) throw nb::key_error(like.c_str());
        ingot::Kernel kernel = *found;
        kernel.name = name.c_str();
        return ingot::registration_problem(kernel);
      },
      "name"_a, "like"_a, "Why no kernel of this name could take the struct of another one, for tests; or nothing.");
  m.def(
      "set_quick_multiply_32", [](bool quick) { return std::exchange(ingot::quick_multiply_32, quick); }, "quick"_a,
      "Whether kernels take this CPU to be quick at VPMULLD, for tests. Returns what they took it for before.");
  m.def(
      "set_permutes_bytes", [](bool there) { return std::exchange(ingot::permutes_bytes, there); }, "there"_a,
      "Whether kernels take this CPU to have AVX512_VBMI, for tests: false where it has. Returns the value before.");
  m.def(
      "call_rules",
      [] {
        std::vector<std::string> norming, by_rows;
        std::set<std::string> ops;
        for (const ingot::Kernel& kernel : ingot::kernel_table()) {
          if (ingot::norms_rows(kernel)) norming.emplace_back(kernel.name);
          if (const ingot::Op* op = ingot::find_op(kernel); op != nullptr && op->shares_by_rows)
            ops.emplace(kernel.op());
        }
        by_rows.assign(ops.begin(), ops.end());
        return std::make_tuple(norming, by_rows, ingot::kPrivateRowElements);
      },
      "CallRules of src/ingot/plugins/target.py, in the order of its fields.");
  m.def(
      "crc32",
      [](const Bytes& data, uint32_t crc) {
        const nb::gil_scoped_release release;
        return ingot::crc32(crc, data.data(), data.size());
      },
      "data"_a, "crc"_a = 0, "zlib's CRC-32 of a buffer, continued from crc.");
  ingot::bind_measure(m);
  bind_ranks(m);
  bind_session(m);
}
