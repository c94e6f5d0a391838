#include "measure/measure_bindings.h"

#include <nanobind/stl/string.h>

#include "measure/bandwidth.h"
#include "measure/peak_flops.h"
#include "measure/tuning.h"
#include "threads/threads.h"

namespace ingot {

void bind_measure(nanobind::module_& m) {
  using namespace nanobind::literals;
  using Released = nanobind::call_guard<nanobind::gil_scoped_release>;  // other Python threads run meanwhile
  m.def("read_bandwidth", &read_bandwidth, "bytes"_a, "threads"_a, "passes"_a = 3, Released(),
        "Bytes per second that threads read from memory, best of the passes.");
  m.def(
      "barrier_seconds", [](int threads) { return ThreadPool::instance().barrier_seconds(threads); }, "threads"_a,
      Released(), "What one barrier of so many threads takes.");
  m.def("peak_flops", &peak_flops, "name"_a, "threads"_a, "seconds"_a, Released(),
        "Operations per second of an arithmetic (f32.avx2, int8.amx, ...) on random operands in L1.");
  m.def("time_matmul", &time_matmul, "kernel"_a, "rows"_a, "n"_a, "k"_a, "group"_a, "gated"_a, "panel_bytes"_a,
        "tactic"_a, "threads"_a, "seconds"_a, Released(),
        "Seconds of the fastest of several calls of a matrix product.");
  m.def("time_experts", &time_experts, "kernel"_a, "rows"_a, "experts"_a, "slots"_a, "n"_a, "k"_a, "group"_a, "gated"_a,
        "panel_bytes"_a, "tactic"_a, "threads"_a, "seconds"_a, Released(),
        "The same of a product of experts, of which each row takes `slots`.");
}

}  // namespace ingot
