"""What an attribute of an op may be, beside its type: the rules that `Op.attr_rules` is made of."""

from collections.abc import Callable, Mapping

from ingot.plan import Attr
from ingot.weight_formats import FORMATS

AttrRule = Callable[[Attr], bool]

LARGEST = (1 << 31) - 1  # count of a plan


def one_of(*values: Attr) -> AttrRule:
    """The attribute is one of these."""
    return lambda value: value in values


def between(low: int, high: int) -> AttrRule:
    """The attribute is a number from low to high."""
    return lambda value: not isinstance(value, str) and low <= value <= high


def not_negative(value: Attr) -> bool:
    """The attribute is 0 or above."""
    return not isinstance(value, str) and value >= 0


is_flag = one_of(0, 1)
# Of ops that multiply with packed weights: how they round their inputs; columns that share a multiplier of the weight.
PRODUCT_RULES: Mapping[str, AttrRule] = {
    "activations": one_of("f32", "bf16", "bf16_inputs", "f16", "int8", "fp8"),
    "group": one_of(0, *(group for each in FORMATS.values() for group in each.groups)),
}
# Of ops that read or write the KV cache; sessions also compare these with the plan's cache.
HEAD_RULES: Mapping[str, AttrRule] = {
    "heads": between(1, 4096),
    "kv_heads": between(1, 4096),
    "head_dim": between(1, LARGEST),
    "layer": between(0, LARGEST),
}
# Of ops over a cache of latents; head_dim counts all numbers of a row, rank those that are the value too.
LATENT_RULES: Mapping[str, AttrRule] = {
    **HEAD_RULES,
    "kv_heads": one_of(1),
    "head_dim": between(4, 1024),
    "rank": between(4, 1024),
}
