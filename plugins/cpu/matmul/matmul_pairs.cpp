#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"

namespace ingot {
using CompressedPairs = CompressedWeight<Pairs>;
}  // namespace ingot

INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::PairsWeight>),
             ingot::matmul_pairs_scratch<ingot::PairsWeight>)
INGOT_KERNEL("matmul.bf16c." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::CompressedPairs>),
             ingot::matmul_pairs_scratch<ingot::CompressedPairs>)
