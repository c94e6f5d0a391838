#include "execution/registry.h"

#include <algorithm>

#include "matmul/weight_formats.h"

namespace ingot {
namespace {

std::vector<Kernel>& table() {
  static std::vector<Kernel> kernels;  // in a function: kernel files register before any order of files is known
  return kernels;
}

std::string_view part(std::string_view name, int index) {
  for (; index > 0; --index) name.remove_prefix(std::min(name.find('.'), name.size() - 1) + 1);
  return name.substr(0, name.find('.'));
}

}  // namespace

std::string_view Kernel::op() const { return part(name, 0); }
std::string_view Kernel::dtype() const { return part(name, 1); }
std::string_view Kernel::isa() const { return part(name, 2); }

std::string_view Kernel::activations() const {
  if (dtype().ends_with("a8")) return "int8";
  if (isa().starts_with("amx")) return "bf16";
  if (!isa().starts_with("avx512bf16")) return "f32";
  if (dtype() == kW8.dtype || dtype() == kW4.dtype) return "bf16";  // holds the weights' whole numbers
  const auto is_own = [this](const WeightFormat& format) { return format.dtype == dtype(); };
  return std::ranges::any_of(kWeightFormats, is_own) ? "bf16_inputs" : "bf16";
}

void register_kernel(const char* name, const std::type_info& args, KernelFn run, ScratchFn scratch,
                     const char* const* numbers, size_t num_numbers) {
  const auto before = [](const Kernel& kernel, std::string_view other) { return kernel.name < other; };
  const auto at = std::lower_bound(table().begin(), table().end(), std::string_view(name), before);
  table().insert(at, Kernel{name, &args, run, scratch, {numbers, numbers + num_numbers}});
}

const std::vector<Kernel>& kernel_table() { return table(); }

const Kernel* find_kernel(std::string_view name) {
  const auto found =
      std::find_if(table().begin(), table().end(), [name](const Kernel& kernel) { return kernel.name == name; });
  return found == table().end() ? nullptr : &*found;
}

}  // namespace ingot
