#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
using W2TWeight = GroupedPairsWeight<W2t>;
using W3TWeight = GroupedPairsWeight<W3t>;
using W4TWeight = GroupedPairsWeight<W4t<false>>;
using W4TSWeight = GroupedPairsWeight<W4t<true>>;
using W8TWeight = GroupedPairsWeight<W8t<false>>;
using W8TSWeight = GroupedPairsWeight<W8t<true>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w2t." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W2TWeight>),
             ingot::matmul_pairs_scratch<ingot::W2TWeight>)
INGOT_KERNEL("matmul.w3t." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W3TWeight>),
             ingot::matmul_pairs_scratch<ingot::W3TWeight>)
INGOT_KERNEL("matmul.w4t." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W4TWeight>),
             ingot::matmul_pairs_scratch<ingot::W4TWeight>)
INGOT_KERNEL("matmul.w4ts." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W4TSWeight>),
             ingot::matmul_pairs_scratch<ingot::W4TSWeight>)
INGOT_KERNEL("matmul.w8t." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W8TWeight>),
             ingot::matmul_pairs_scratch<ingot::W8TWeight>)
INGOT_KERNEL("matmul.w8ts." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W8TSWeight>),
             ingot::matmul_pairs_scratch<ingot::W8TSWeight>)
