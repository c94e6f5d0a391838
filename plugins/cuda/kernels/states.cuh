// Where the layers that keep a state find it.
//
//   slot: the states of all such layers after some token of a sequence, float32. The block table of their cache group
//   says in which slot the state lies after the last token of a block, or after the last token of a step; -1 keeps
//   none.
#pragma once

#include "paged_attention.cuh"

// The slots of one layer. Runs: the tokens that a step has of each sequence.
struct States {
  float* slots;       // where slot 0 has the layer's numbers
  const int* tables;  // [sequences][table_width]
  int table_width;
  int slot_size;  // numbers from a slot to the next one

  // Behind the token at a position; null: nowhere.
  INGOT_DEVICE float* at(const Item& run, int position) const {
    const int slot = tables[static_cast<int64_t>(run.sequence) * table_width + position / kBlockTokens];
    return slot < 0 ? nullptr : slots + static_cast<int64_t>(slot) * slot_size;
  }
  // What a run starts from; null: zeros.
  INGOT_DEVICE const float* before(const Item& run) const { return run.position ? at(run, run.position - 1) : nullptr; }
  // Where the state is left behind token `index` of a run, at the ends of blocks and of the run; null: nowhere.
  INGOT_DEVICE float* after(const Item& run, int index) const {
    const int position = run.position + index;
    const bool ends = index + 1 == run.count || position % kBlockTokens == kBlockTokens - 1;
    return ends ? at(run, position) : nullptr;
  }
  // Tokens to the end of the block of that at a position, itself included.
  INGOT_DEVICE static int until_end(int position) { return kBlockTokens - position % kBlockTokens; }
};

#define INGOT_STATES_PARAMETERS const Item *runs, float *slots, const int *tables, int table_width, int slot_size
#define INGOT_STATES_GIVEN \
  States { slots, tables, table_width, slot_size }
