// The table of kernels that the INGOT_KERNEL lines fill while the module loads.
#pragma once

#include <string_view>
#include <vector>

#include "ingot/kernel.h"

namespace ingot {

struct Kernel {
  const char* name;            // <op>.<dtype>.<isa>
  const std::type_info* args;  // the struct it takes
  KernelFn run;
  ScratchFn scratch;                 // or null
  std::vector<const char*> numbers;  // attributes that an ElementsArgs holds

  std::string_view op() const;
  std::string_view dtype() const;
  std::string_view isa() const;
  std::string_view activations() const;  // of a product, as plans have them
};

const std::vector<Kernel>& kernel_table();         // in order of names
const Kernel* find_kernel(std::string_view name);  // null where there is none

}  // namespace ingot
