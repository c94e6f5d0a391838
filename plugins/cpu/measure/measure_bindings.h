// What `ingot bench` and the tuning of builds call of the module ingot._cpu.
#pragma once

#include <nanobind/nanobind.h>

namespace ingot {

void bind_measure(nanobind::module_& m);

}  // namespace ingot
