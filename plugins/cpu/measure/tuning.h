// How long matrix products take on this machine, for builds that choose between ways of the same bits.
#pragma once

#include <cstdint>
#include <string>

namespace ingot {

// Seconds of the fastest of several calls on made-up numbers: rows of x times a weight [n, k] (gated: half gate, half
// up) in panels of panel_bytes each. Calls go on for about `seconds`, but at least two and at most 100 times. Throws
// std::invalid_argument for what is no product that this machine can run.
double time_matmul(const std::string& kernel, int64_t rows, int64_t n, int64_t k, int64_t group, bool gated,
                   int64_t panel_bytes, int tactic, int threads, double seconds);

// The same of a product of experts (op moe_gate_up or moe_down), each weight [n, k], of which each row takes `slots`.
// Every call takes others, as the layers and steps of a model do.
double time_experts(const std::string& kernel, int64_t rows, int64_t experts, int64_t slots, int64_t n, int64_t k,
                    int64_t group, bool gated, int64_t panel_bytes, int tactic, int threads, double seconds);

}  // namespace ingot
