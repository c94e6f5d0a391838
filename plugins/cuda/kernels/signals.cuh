// How the warps of a block of sm_90a wait for each other where some copy and others multiply: signals in shared memory
// (mbarrier), named barriers, and registers that one warpgroup gives to another. Tests emulate them.
#pragma once

#include "device.cuh"

// Given for the n-th time (from 0) once `count` threads have arrived since it was given before; a thread that waits for
// that passes parity n % 2.
struct alignas(8) Signal {
  uint64_t state;
};

#ifdef __CUDACC__
INGOT_DEVICE uint32_t signal_address(const Signal* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
// By one thread, before a barrier of all.
INGOT_DEVICE void signal_init(Signal* at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(signal_address(at)), "r"(count) : "memory");
}
INGOT_DEVICE void signal_arrive(Signal* at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(signal_address(at)) : "memory");
}
// Arrives once all copies that the thread has begun are there.
INGOT_DEVICE void signal_arrive_behind_copies(Signal* at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(signal_address(at)) : "memory");
}
INGOT_DEVICE void signal_wait(Signal* at, unsigned parity) {
  uint32_t given;
  do {
    asm volatile(
        "{\n.reg .pred %%given;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %%given, [%1], %2;\n"
        "selp.u32 %0, 1, 0, %%given;\n}\n"
        : "=r"(given)
        : "r"(signal_address(at)), "r"(parity)
        : "memory");
  } while (!given);
}

// Barrier `number` (1 to 15) of kThreads threads: some wait there, the others only say that they have been there.
template <int kThreads>
INGOT_DEVICE void barrier_wait(int number) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads>
INGOT_DEVICE void barrier_pass(int number) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// What each thread of a warpgroup has from now on: what one gives, the others may take.
template <int kRegisters>
INGOT_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
INGOT_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#else
#include "signals.h"
#endif
