// Signals and named barriers (plugins/cuda/kernels/signals.cuh) on the emulated device.
//
// In one order of threads a copy that a signal waits for arrives when nobody can go on without it; in the other at
// once. Errors: more arrivals than a signal counts, a signal that nobody made, and threads that wait for ever. What
// happens on both sides of a signal or of a named barrier counts as ordered, no matter which thread waited for it.
#pragma once

#include "emulated_device.h"

namespace emulated {

void make_signal(const void* at, int count);
void arrive(const void* at);
void arrive_behind_copies(const void* at);
void wait_signal(const void* at, unsigned parity);
void meet(int number, int threads, bool waits);

}  // namespace emulated

inline void signal_init(Signal* at, int count) { emulated::make_signal(at, count); }
inline void signal_arrive(Signal* at) { emulated::arrive(at); }
inline void signal_arrive_behind_copies(Signal* at) { emulated::arrive_behind_copies(at); }
inline void signal_wait(Signal* at, unsigned parity) { emulated::wait_signal(at, parity); }
template <int kThreads>
void barrier_wait(int number) {
  emulated::meet(number, kThreads, true);
}
template <int kThreads>
void barrier_pass(int number) {
  emulated::meet(number, kThreads, false);
}
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}
