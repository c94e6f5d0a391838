// The Python module ingot._cpu: what this machine offers, the kernel table, and sessions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "cpu_isa.h"
#include "registry.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_cpu, m) {
  m.doc() = "Kernels and sessions of the CPU targets; used through ingot.plugins.cpu.target.";
  m.def("detect_isa", &ingot::detect_isa, "Best of amx, avx512, avx2 that CPU and operating system offer, or none.");
  m.def("core_count", [] { return ingot::ThreadPool::instance().cores(); }, "Cores that this process may use.");
  m.def(
      "kernel_names",
      [] {
        std::vector<std::string> names;
        for (const ingot::Kernel& kernel : ingot::kernel_table()) names.emplace_back(kernel.name);
        return names;
      },
      "Names of all compiled kernels, sorted, whatever this machine can run.");
}
