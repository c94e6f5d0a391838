// The contract between a Session and its kernels: plain structs in, nothing out but memory. Each op's struct lies
// beside its kernels, in plugins/cpu/<group>/<op>_args.h.
//
// Every thread of the pool calls the kernel with the same arguments and its own Team view; the kernel splits the work.
// The plan says where a barrier stands between two calls; a kernel that needs one inside calls team.barrier().
#pragma once

#include <cstddef>
#include <cstdint>
#include <typeinfo>

namespace ingot {

enum class Activation : int32_t;  // matmul/activations.h lists them

// One thread's view of the pool during a kernel.
class Team {
 public:
  int index = 0;  // 0 .. count-1
  int count = 1;
  std::byte* shared = nullptr;  // the step's scratch, as large as the kernel's scratch function asked, 64-byte aligned

  void barrier() const;                         // all threads of the team
  int64_t next_item() const;                    // 0, 1, 2, ...: each number to one thread; anew after every barrier
  int64_t items_taken() const;                  // how many of them were given out since the last barrier
  std::byte* scratch(size_t bytes) const;       // this thread's own, 64-byte aligned, valid during the call
  std::byte* rows_scratch(size_t bytes) const;  // another one, for rows that this thread prepares for itself

  // In place of next_item, of items 0 to items - 1: those of this thread's share in order, then what slower threads
  // have left of theirs; `items` where none is left. Neighbouring items write to neighbouring memory, and cores whose
  // caches lie far apart write slowly where the other one writes.
  int64_t next_of_shares(int64_t items) const;
  int64_t next_of_group_shares(int64_t items) const;  // the same among the threads of the group

  // Contiguous share [begin, end) of n items for this thread.
  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t n) const { return {n * index / count, n * (index + 1) / count}; }

  // This thread and its neighbours.
  static constexpr int kGroup = 8;
  Range group() const {
    const int first = index / kGroup * kGroup;
    return {first, first + kGroup < count ? first + kGroup : count};
  }

  void* pool = nullptr;
};

// Rows of so many elements in all are prepared for a product, that is normed or rounded, by every thread for itself
// instead of by the team, which then need not wait: that takes a core about as long as a large team takes to meet at a
// barrier. Two threads meet sooner, but one of them is mostly late.
constexpr int64_t kPrivateRowElements = 16384;

// Panels [begin, end) of a weight, contiguous at data.
struct WeightSlice {
  int64_t begin, end;
  const std::byte* data;
};

using KernelFn = void (*)(const void* args, const Team& team);
using ScratchFn = size_t (*)(const void* args);  // bytes of Team::shared for args with the largest rows

void register_kernel(const char* name, const std::type_info& args, KernelFn run, ScratchFn scratch,
                     const char* const* numbers, size_t num_numbers);

template <typename Args, void (*kRun)(const Args&, const Team&)>
struct KernelEntry {
  explicit KernelEntry(const char* name, ScratchFn scratch = nullptr) {
    register_kernel(name, typeid(Args), run, scratch, nullptr, 0);
  }

  // numbers: the attributes that the session puts into `numbers` of ElementsArgs, in this order.
  template <size_t kCount>
  KernelEntry(const char* name, const char* const (&numbers)[kCount]) {
    static_assert(kCount <= sizeof(Args::numbers) / sizeof(float), "more than kMostNumbers of rows/elements_args.h");
    register_kernel(name, typeid(Args), run, nullptr, numbers, kCount);
  }

 private:
  static void run(const void* args, const Team& team) { kRun(*static_cast<const Args*>(args), team); }
};

}  // namespace ingot

// Last line of a kernel file: INGOT_KERNEL("matmul.bf16.avx2", MatmulArgs, matmul_bf16_avx2) or, with scratch,
// INGOT_KERNEL("matmul.bf16.amx", MatmulArgs, matmul_bf16_amx, matmul_bf16_amx_scratch) or, of an elementwise op with
// attributes, INGOT_KERNEL("scale.f32.avx2", ElementsArgs<1>, scale, {"factor"})
#define INGOT_JOIN2(a, b) a##b
#define INGOT_JOIN(a, b) INGOT_JOIN2(a, b)
#define INGOT_KERNEL(name, Args, fn, ...)                                                                           \
  namespace {                                                                                                       \
  const ::ingot::KernelEntry<::ingot::Args, fn> INGOT_JOIN(registered_, __LINE__){name __VA_OPT__(, ) __VA_ARGS__}; \
  }
