// See group_products.h.
#include "group_products.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace emulated {
namespace {

constexpr unsigned kGroup = 128, kDepth = 16, kMostDepth = 32;  // k of 16 bits, of FP8
constexpr uint64_t kSwizzled = 1;                               // lines of 128 bytes

struct Queued {
  GroupProduct of;
  std::vector<float> before;  // the sums
  uint32_t left[kDepth];      // words of a in registers: those of the lanes with the same rows, lane after lane
  bool computed;
};

struct Thread {
  std::vector<Queued> queue;
  std::vector<size_t> batches;  // products of each committed batch that is not over
  size_t open = 0;
  bool begun = false;
  uint64_t done = 0;  // says which products, in order
};

std::vector<Thread> threads;

Thread& self() { return threads[thread_index().x]; }
unsigned lane_of() { return thread_index().x % 32; }

struct Described {
  uint64_t start, leading, stride;  // bytes
};

Described read_descriptor(uint64_t word) {
  if (word >> 62 != kSwizzled) fail("a descriptor whose lines are not swizzled by 128 bytes");
  if (word >> 49 & 7) fail("a descriptor with a base offset");
  return {(word & 0x3fff) << 4, (word >> 16 & 0x3fff) << 4, (word >> 32 & 0x3fff) << 4};
}

void check_descriptor(uint64_t word, unsigned lines, bool transposed) {
  const Described at = read_descriptor(word);
  if (at.stride != 1024) fail("a descriptor whose eight lines are not 1024 bytes");
  const uint64_t within = at.start % 1024;
  if (transposed ? within != 0 : within != 0 && within != 32 && within != 64 && within != 96) {
    fail("a descriptor of a tile that does not lie on 1024 bytes");
  }
  if (transposed && lines > 64 && (at.leading == 0 || at.leading % 1024)) fail("a descriptor whose panels overlap");
}

// A number of so many bytes of a tile: line `line` (of columns: column `line`), k.
const unsigned char* place_of(uint64_t word, unsigned line, unsigned k, bool transposed, unsigned bytes) {
  const Described at = read_descriptor(word);
  const uint64_t offset = transposed
                              ? at.start + line / 64 * at.leading + k / 8 * at.stride + k % 8 * 128 + line % 64 * 2
                              : at.start + line / 8 * at.stride + line % 8 * 128 + k * bytes;
  const uint64_t swizzled = offset ^ (offset >> 7 & 7) << 4;
  if (swizzled + bytes > shared_bytes()) fail("a descriptor of memory behind the end of shared memory");
  return shared_memory() + swizzled;
}

// All 16 bytes of neighbours that a thread's products read.
template <class F>
void each_piece(const Queued& one, F see) {
  const GroupProduct& of = one.of;
  const unsigned warp = thread_index().x % kGroup / 32, piece = 16 / of.bytes;
  if (!of.fragment) {
    for (unsigned half = 0; half < 4; ++half) {
      see(of.a, 16 * warp + lane_of() / 4 + half % 2 * 8, half / 2 * piece, false);
    }
  }
  for (unsigned j = 0; j < static_cast<unsigned>(of.columns); j += 8) {
    if (of.transposed) {
      for (unsigned i = 0; i < 2; ++i) see(of.b, j, lane_of() % 8 + 8 * i, true);
    } else {
      for (unsigned i = 0; i < 2; ++i) see(of.b, j + lane_of() % 8, piece * i, false);
    }
  }
}

void check_reads(const Queued& one) {
  each_piece(one, [&](uint64_t word, unsigned line, unsigned k, bool transposed) {
    check_access(place_of(word, line, k, transposed, one.of.bytes), 16, Access::kRead);
  });
}

float value_at(const GroupProduct& of, uint64_t word, unsigned line, unsigned k, bool transposed) {
  uint16_t bits = 0;
  std::memcpy(&bits, place_of(word, line, k, transposed, of.bytes), of.bytes);
  return of.number(bits);
}

// `before` becomes the product, or has it added.
void compute(Queued& one) {
  const GroupProduct& of = one.of;
  const unsigned warp = thread_index().x % kGroup / 32, lane = lane_of(), depth = 32 / of.bytes;
  one.computed = true;
  float left[2][kMostDepth];
  for (unsigned half = 0; half < 2; ++half) {
    for (unsigned k = 0; k < depth; ++k) {
      if (of.fragment) {
        const uint32_t word = one.left[k % 8 / 2 * 4 + half + k / 8 * 2];
        left[half][k] = of.number(static_cast<uint16_t>(k % 2 ? word >> 16 : word));
      } else {
        left[half][k] = value_at(of, of.a, 16 * warp + lane / 4 + 8 * half, k, false);
      }
    }
  }
  for (unsigned j = 0; j < static_cast<unsigned>(of.columns); j += 8) {
    for (unsigned c = 0; c < 2; ++c) {
      float sums[2] = {};
      for (unsigned k = 0; k < depth; ++k) {
        const float right = value_at(of, of.b, j + 2 * (lane % 4) + c, k, of.transposed);
        for (unsigned half = 0; half < 2; ++half) sums[half] += left[half][k] * right;
      }
      for (unsigned half = 0; half < 2; ++half) one.before[j / 2 + 2 * half + c] += sums[half];
    }
  }
}

}  // namespace

void start_groups(size_t count) { threads.assign(count, Thread{}); }

// What a barrier or the end of a block is not reached without.
void check_groups() {
  for (size_t i = 0; i < threads.size(); ++i) {
    if (threads[i].done != threads[i / kGroup * kGroup].done) fail("warps of a group that do not multiply the same");
  }
}
void check_ended() {
  for (const Thread& each : threads) {
    if (!each.queue.empty() || each.open) fail("products of a group that nobody waits for");
  }
}

void begin_group() {
  exchange("group_begin", nullptr, 0);
  self().begun = true;
}

void queue_product(const GroupProduct& product) {
  const auto fragment = product.fragment;
  const uint32_t words[9] = {
      static_cast<uint32_t>(product.b),
      static_cast<uint32_t>(product.b >> 32),
      static_cast<uint32_t>(product.a),
      static_cast<uint32_t>(product.a >> 32),
      static_cast<uint32_t>(product.columns * 16 + product.bytes * 4 + product.keep * 2 + product.transposed),
      fragment ? fragment[0] : 0,
      fragment ? fragment[1] : 0,
      fragment ? fragment[2] : 0,
      fragment ? fragment[3] : 0};
  const uint32_t* every = exchange(fragment ? "wgmma of registers" : "wgmma", words, 9);
  Thread& thread = self();
  if (!thread.begun) fail("a batch of products without group_begin()");
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (std::memcmp(every + 9 * lane, words, 5 * sizeof(uint32_t)) != 0) fail("lanes that multiply different tiles");
  }
  if (!fragment) check_descriptor(product.a, 64, false);
  check_descriptor(product.b, static_cast<unsigned>(product.columns), product.transposed);
  Queued one{product, {}, {}, false};  // not computed yet
  for (unsigned i = 0; i < 16 && fragment; ++i) one.left[i] = every[9 * (lane_of() / 4 * 4 + i / 4) + 5 + i % 4];
  // A product goes on from the sums of the one before, of which it need not wait for the end.
  const size_t count = static_cast<size_t>(product.columns) / 2;
  const Queued* last = nullptr;
  for (const Queued& each : thread.queue) {
    if (each.of.sum == product.sum) last = &each;
  }
  one.before.assign(count, 0.f);
  if (product.keep && last) one.before = last->before;
  if (product.keep && !last) std::memcpy(one.before.data(), product.sum, 4 * count);
  for (size_t i = 0; i < count; ++i) product.sum[i] = std::numeric_limits<float>::quiet_NaN();
  check_reads(one);
  if (runs_backwards()) compute(one);
  for (int i = 0; i < 5; ++i) thread.done = (thread.done ^ words[i]) * 0x100000001b3ull;
  thread.queue.push_back(one);
  thread.open += 1;
}

void commit_products() {
  exchange("group_commit", nullptr, 0);
  Thread& thread = self();
  thread.batches.push_back(thread.open);
  thread.open = 0;
  thread.begun = false;
}

void wait_products(int pending) {
  exchange("group_wait", nullptr, 0);
  Thread& thread = self();
  while (thread.batches.size() > static_cast<size_t>(pending)) {
    for (size_t i = 0; i < thread.batches.front(); ++i) {
      Queued one = thread.queue.front();
      thread.queue.erase(thread.queue.begin());
      check_reads(one);
      const bool late = !one.computed;
      if (late) compute(one);
      const auto next = std::find_if(thread.queue.begin(), thread.queue.end(),
                                     [&](const Queued& each) { return each.of.sum == one.of.sum; });
      if (next == thread.queue.end()) {
        std::memcpy(one.of.sum, one.before.data(), 4 * one.before.size());
      } else if (late && next->of.keep) {
        next->before = one.before;
      }
    }
    thread.batches.erase(thread.batches.begin());
  }
}

}  // namespace emulated
