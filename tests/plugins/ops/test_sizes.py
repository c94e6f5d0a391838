"""Sizes that do not fit together are named."""

import pytest

from ingot.plan import Attr
from ingot.plugins.op import Shape
from ingot.plugins.registry import find_op

HEADS: dict[str, Attr] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "keys_as_values": 0}
QUERIES: dict[str, Attr] = {"heads": 4, "head_dim": 8}
PLAIN: dict[str, Attr] = {"gated": 0}
SILU: dict[str, Attr] = {"activation": "silu"}
GATED: dict[str, Attr] = {"gated": 1}


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "words"),
    [
        ("matmul", [(8,), (6, 8), (6,), (6,)], PLAIN, None),
        ("matmul", [(8,), (6, 8), (6,), (3,)], GATED, None),
        ("matmul", [(9,), (6, 8), None, None], PLAIN, "9 columns cannot be multiplied with a weight (6, 8)"),
        ("matmul", [(8,), (6,), None, None], PLAIN, "cannot be multiplied"),
        ("matmul", [(8,), (7, 8), None, None], GATED, "even number of rows"),
        ("matmul", [(8,), (6, 8), (3,), None], GATED, "bias has shape (3,) instead of (6,)"),
        ("matmul", [(8,), (6, 8), None, (6,)], GATED, "residual has shape (6,) instead of (3,)"),
        ("rms_norm", [(8,), (8,), None], {}, None),
        ("rms_norm", [(8,), (8,), (9,)], {}, "residual has shape (9,)"),
        ("layer_norm", [(8,), (8,), (7,), None], {}, "has shape (7,) instead of (8,)"),
        ("layer_norm", [(8,), (8,), (8,), (8,)], {}, None),
        ("add", [(8,), (8,)], {}, None),
        ("add", [(8,), (1,)], {}, "b has shape (1,)"),
        ("activation", [(8,), None], {}, None),
        ("activation", [(8,), (4,)], {}, "up has shape"),
        ("add_gated", [(8,), (8,), (1,)], {}, None),
        ("add_gated", [(8,), (4,), (1,)], {}, "b has shape"),
        ("add_gated", [(8,), (8,), (8,)], {}, "gate has shape"),
        ("embedding", [(61, 8), (20, 8)], {}, None),
        ("embedding", [(61, 8), (20, 4)], {}, "not matrices of one width"),
        ("embedding", [(61,), None], {}, "not matrices of one width"),
        ("rope_kv_write", [(64,), (8,), None, None], HEADS, None),
        ("rope_kv_write", [(63,), (8,), None, None], HEADS, "qkv has shape (63,) instead of (64,)"),
        ("rope_kv_write", [(64,), (10,), None, None], HEADS, "10 rotary dimensions"),
        ("rope_kv_write", [(64,), None, (8,), (16,)], HEADS, None),
        ("rope_kv_write", [(64,), None, (16,), (16,)], HEADS, "q_norm has shape (16,)"),
        ("rope_kv_write", [(64,), None, (32,), (32,)], HEADS, "k_norm has shape (32,)"),
        ("rope_kv_write", [(48,), None, None, None], {**HEADS, "keys_as_values": 1}, None),
        ("rope_kv_write", [(64,), None, None, None], {**HEADS, "keys_as_values": 1}, "instead of (48,)"),
        ("rope_query", [(32,), (8,), (8,)], QUERIES, None),
        ("rope_query", [(32,), (10,), None], QUERIES, "10 rotary dimensions"),
        ("rope_query", [(31,), None, (32,)], QUERIES, "q has shape (31,) instead of (32,)"),
        ("rope_query", [(32,), None, (16,)], QUERIES, "q_norm has shape (16,)"),
        ("paged_attention", [(32,), None, None], HEADS, None),
        ("paged_attention", [(31,), None, None], HEADS, "q has shape (31,) instead of (32,)"),
        ("paged_attention", [(32,), (2,), None], HEADS, "sinks has shape (2,) instead of (4,)"),
        ("paged_attention", [(32,), None, (2,)], HEADS, "slopes has shape (2,) instead of (4,)"),
        ("paged_attention", [(32,), None], {**HEADS, "kv_heads": 3}, "4 heads are not a multiple of 3 KV heads"),
        ("softcap", [(32,)], {"cap": 2.0}, None),
        ("softcap", [(32,)], {"cap": 0.0}, "not above 0"),
        ("rope_kv_write", [(64,), (9,), None, None], HEADS, "9 rotary dimensions"),
        ("matmul", [(8,), (9, 8), None, None], GATED, "even number of rows"),
        ("moe_route", [(5,), None], {"per_token": 1}, None),
        ("moe_route", [(5,), None], {"per_token": 5}, None),
        ("moe_route", [(5,), None], {"per_token": 0}, "cannot take 0 of 5 experts"),
        ("moe_route", [(5,), None], {"per_token": 6}, "cannot take 6 of 5 experts"),
        ("moe_route", [(5,), (4,)], {"per_token": 2}, "bias has shape (4,) instead of (5,)"),
        ("moe_route", [(8,), None], {"per_token": 4, "groups": 4, "group_top": 2}, None),
        ("moe_route", [(8,), None], {"per_token": 5, "groups": 4, "group_top": 2}, "cannot take 5 of 4 experts"),
        ("moe_route", [(8,), None], {"per_token": 1, "groups": 3}, "among 3 groups of 2 or more"),
        ("moe_route", [(8,), None], {"per_token": 1, "groups": 8}, "among 8 groups of 2 or more"),
        ("moe_route", [(8,), None], {"per_token": 1, "groups": 8, "group_best": 1}, None),
        ("moe_route", [(8,), None], {"per_token": 1, "groups": 2, "group_top": 3}, "experts of 3 groups of 2"),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), None, None], SILU, None),
        ("moe_gate_up", [(8,), (6,), (5, 6, 8), None, None], SILU, "cannot take 6 of 5 experts"),
        ("moe_down", [(18,), (6,), (6,), (5, 8, 3), None, None], {}, "cannot take 6 of 5 experts"),
        ("rope_kv_write", [(64,), (7,), None, None], HEADS, "7 rotary dimensions"),
        ("moe_gate_up", [(8,), (2,), (5, 7, 8), None, None], SILU, "gates and ups of experts (5, 7, 8)"),
        ("moe_gate_up", [(8,), (2,), (5, 6, 9), None, None], SILU, "an input of 8 columns"),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), (30,), None], SILU, None),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), (6,), None], SILU, "bias has shape (6,) instead of (30,)"),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), None, None], {"activation": "gelu", "limit": 7.0}, "none of gelu"),
        ("moe_down", [(6,), (2,), (2,), (5, 8, 3), (8,), None], {}, "bias has shape (8,) instead of (40,)"),
        ("moe_down", [(6,), (2,), (2,), (5, 8, 3), None, None], {}, None),
        ("moe_down", [(7,), (2,), (2,), (5, 8, 3), None, None], {}, "2 slots in 7 columns"),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), None, (10,)], SILU, None),
        ("moe_gate_up", [(8,), (2,), (5, 6, 8), None, (8,)], SILU, "lists has shape (8,) instead of (10,)"),
        ("moe_down", [(6,), (2,), (2,), (5, 8, 3), None, (10,)], {}, None),
        ("moe_down", [(6,), (2,), (2,), (5, 8, 3), None, (2,)], {}, "lists has shape (2,) instead of (10,)"),
        ("moe_down", [(6,), (2,), (3,), (5, 8, 3), None, None], {}, "weights has shape (3,) instead of (2,)"),
        ("round_slots_to_fp8", [(6,)], {"group": 0, "slots": 3}, None),
        ("round_slots_to_fp8", [(7,)], {"group": 0, "slots": 3}, "7 columns are not those of 3 slots"),
        ("gather_rows", [(5,)], {}, None),
        ("take_columns", [(12,)], {"of": 6, "first": 2, "count": 4}, None),
        ("take_columns", [(12,)], {"of": 6, "first": 3, "count": 4}, "columns 3 to 7 of each 6 cannot be taken"),
        ("take_columns", [(13,)], {"of": 6, "first": 0, "count": 3}, "cannot be taken out of 13"),
    ],
)
def test_sizes(op: str, shapes: list[Shape | None], attrs: dict[str, Attr], words: str | None) -> None:
    usual = {key: value for key, value in find_op(op).attrs.items() if not isinstance(value, type)}
    problem = find_op(op).size_problem(shapes, {**usual, **attrs})
    assert (problem is None) == (words is None)
    assert words is None or words in str(problem)
