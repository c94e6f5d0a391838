#include INGOT_LEVEL_HEADER
#include "rows/elementwise_kernel.h"

INGOT_KERNEL("activation.f32." INGOT_LEVEL, ElementwiseArgs, ingot::activation<ingot::Simd>)
INGOT_KERNEL("add.f32." INGOT_LEVEL, ElementsArgs<2>, ingot::add<ingot::Simd>)
INGOT_KERNEL("scale.f32." INGOT_LEVEL, ElementsArgs<1>, ingot::scale<ingot::Simd>, {"factor"})
INGOT_KERNEL("softcap.f32." INGOT_LEVEL, ElementwiseArgs, ingot::softcap<ingot::Simd>)
