// What kernels of sample take.
#pragma once

#include <cstdint>

namespace ingot {

struct SampleArgs {
  const float* logits;  // [rows, vocab]
  int64_t vocab, draws;
  const int32_t* row;  // [draws], and so below
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const uint64_t* seed;
  const uint64_t* counter;
  // DrawRules of src/ingot/step_io.py; all null where no draw has any.
  const float* min_p;
  const float* repetition_penalty;
  const float* frequency_penalty;
  const float* presence_penalty;
  const int32_t* history_starts;  // [draws + 1]
  const int32_t* history;
  const int32_t* num_prompt;
  const int32_t* bias_starts;  // [draws + 1]
  const int32_t* bias_ids;
  const float* bias;
  // ProbRows; all null, the results too, where nobody wants them.
  const int32_t* given;
  const int32_t* top_starts;  // [draws + 1]
  int32_t* ranks;
  int32_t* top_ids;  // [top_starts[draws]]
  float* top_log_probs;
  int32_t* ids;
  float* log_probs;
};

}  // namespace ingot
