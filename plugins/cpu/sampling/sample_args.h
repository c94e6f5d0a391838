// What kernels of sample take.
#pragma once

#include <cstdint>

namespace ingot {

// One token from a row of logits, or the probability of one that is known; see plugins/ops/sample.py.
struct Draw {
  int32_t row = 0;
  float temperature = 0, top_p = 1, min_p = 0;
  int32_t top_k = 0;
  uint64_t seed = 0, counter = 0;
  const int32_t* bias_ids = nullptr;
  const float* bias = nullptr;  // -inf bans a token
  int64_t num_biases = 0;
  // A bit per token, the lowest first: those that may be drawn; null: all. Asked once, by the thread that draws. Null
  // itself where nothing limits the tokens.
  const uint32_t* (*allowed)(void*) = nullptr;
  void (*drawn)(void*, int32_t) = nullptr;  // told by the same thread of what it drew, if that is a token
  void* guided = nullptr;                   // what these two take
  float repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  const int32_t* history = nullptr;  // the prompt, then the generated tokens; none where nothing is penalised
  int64_t history_length = 0, num_prompt = 0;
  const float* processed = nullptr;  // [vocab], logits to draw from in place of the row; probabilities are the row's
  int32_t known = -1;                // a token whose probability is wanted: then nothing is drawn
  int32_t* rank = nullptr;           // null where nobody wants to know
  bool best_only = false;            // nobody wants more than the best token of the row: its probability is left out
  int32_t num_top = 0;
  int32_t* top_ids = nullptr;  // [num_top]
  float* top_log_probs = nullptr;
};

struct SampleArgs {
  const float* logits;  // [rows, vocab]
  int64_t vocab, num_draws;
  const Draw* draws;
  int32_t* ids;  // [num_draws]
  float* log_probs;
};

}  // namespace ingot
