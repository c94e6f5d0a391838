"""What attributes may be, beside their types: every op's rules, at their edges."""

import pytest

from ingot.plan import Attr
from ingot.plugins.registry import find_op, op_names

HEADS: dict[str, Attr] = {"layer": 0, "heads": 4, "kv_heads": 2, "head_dim": 8}
GIVEN: dict[str, dict[str, Attr]] = {
    "matmul": {},
    "moe_down": {},
    "moe_gate_up": {"activation": "silu"},
    "moe_route": {"per_token": 2, "normalized": 1},
    "activation": {"activation": "gelu"},
    "rms_norm": {"eps": 0.0},
    "layer_norm": {"eps": 0.0},
    "paged_attention": {**HEADS, "scale": 1.0},
    "rope_kv_write": HEADS,
    "rope_query": {"heads": 4, "head_dim": 8},
}


def _problem(op: str, changed: dict[str, Attr]) -> str | None:
    found = find_op(op)
    usual = {key: value for key, value in found.attrs.items() if not isinstance(value, type)}
    return found.problem(found.with_batch(["x"] * len(found.inputs)), {**usual, **GIVEN[op], **changed})


@pytest.mark.parametrize(
    ("op", "key", "allowed", "refused"),
    [
        ("matmul", "activations", "int8", "w8"),
        ("matmul", "activation", "none", "tanh"),
        ("matmul", "gated", 1, 2),
        ("matmul", "group", 16, 8),
        ("moe_down", "group", 0, 1),
        ("moe_gate_up", "activation", "relu", ""),
        ("moe_route", "normalized", 0, -1),
        ("moe_route", "score", "sigmoid", "tanh"),
        ("moe_route", "eps", 0.0, -1e-20),
        ("moe_route", "floor", 0.0, -1e-20),
        ("moe_route", "groups", 8, 0),
        ("moe_route", "group_top", 8, 0),
        ("activation", "activation", "silu", "Silu"),
        ("rms_norm", "eps", 0.0, -1e-6),
        ("layer_norm", "eps", 0.0, -1e-6),
        ("paged_attention", "softcap", 0.0, -1.0),
        ("paged_attention", "window", 1 << 31, (1 << 31) + 1),
        ("paged_attention", "layer", 0, -1),
        ("paged_attention", "kv_heads", 1, 0),
        ("rope_kv_write", "heads", 4096, 4097),
        ("rope_kv_write", "head_dim", 1, 0),
        ("rope_kv_write", "interleaved", 1, 2),
        ("rope_kv_write", "norm_eps", 0.0, -1.0),
        ("rope_kv_write", "value_norm", 1, 2),
        ("rope_kv_write", "keys_as_values", 1, -1),
        ("rope_query", "head_dim", 1, 0),
        ("rope_query", "norm_eps", 0.0, -1.0),
    ],
)
def test_rules_at_their_edges(op: str, key: str, allowed: Attr, refused: Attr) -> None:
    assert _problem(op, {key: allowed}) is None
    assert _problem(op, {key: refused}) == f"attribute {key} cannot be {refused!r}"


@pytest.mark.parametrize("op", op_names())
def test_a_rule_is_for_an_attribute_that_the_op_has(op: str) -> None:
    assert set(find_op(op).attr_rules) <= set(find_op(op).attrs)
