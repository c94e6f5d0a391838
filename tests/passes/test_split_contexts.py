"""Into how many parts attention cuts contexts: what the plan states, and why contexts stay whole."""

import dataclasses

import pytest

from ingot.builder.passes.split_contexts import split_contexts
from ingot.builder.pipeline import plan_passes
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr, Plan, Split
from ingot.plan_check import check_plan
from ingot.plan_json import plan_from_json
from ingot.plugins.registry import find_target
from ingot.plugins.split_rules import SplitRules
from tests.builder.test_schedule import LAYER, plan_of

RULES = SplitRules(blocks=256, parts=64, least_tokens=128, dtypes=frozenset({DType.BF16}), group=16, latent_rows=32)


def plan(
    *, batch: int = 40, longest: int = 1 << 20, kv_heads: int = 8, dtype: DType = DType.BF16, decode_tokens: int = 8
) -> Plan:
    """One attention call."""
    made = plan_of(LAYER)
    limits = dataclasses.replace(made.limits, max_batch_size=batch, max_seq_len=longest)
    cache = dataclasses.replace(made.caches[0], kv_heads=kv_heads, dtype=dtype)
    heads: dict[str, Attr] = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "window": 0}
    steps = [
        dataclasses.replace(each, attrs={**each.attrs, **heads}) if each.op == "paged_attention" else each
        for each in made.steps
    ]
    made = dataclasses.replace(made, limits=limits, caches=(cache,), max_positions=longest, steps=tuple(steps))
    return dataclasses.replace(made, decode_tokens=decode_tokens)


def test_the_fewer_items_the_more_parts_until_the_gpu_is_full() -> None:
    made, report = split_contexts(plan(), RULES)
    assert (report.name, report.fired, report.refused) == ("split_contexts", 1, {})
    for items in range(1, 41):
        assert made.parts_of(items, 1 << 20) == max(1, min(256 // (8 * items), 64)), items
    assert [each.parts for each in made.splits] == [32, 16, 10, 8, 6, 5, 4, 3, 2, 1]
    assert made.splits[-1] == Split(most_items=40, parts=1, least_tokens=128)
    assert plan_from_json(made.to_json()) == made


def test_no_part_is_tiny_and_none_is_beyond_what_is_merged() -> None:
    made, _ = split_contexts(plan(kv_heads=1), RULES)
    assert made.parts_of(1, 1 << 20) == 64
    assert [made.parts_of(1, tokens) for tokens in (0, 127, 255, 256, 1024)] == [1, 1, 1, 2, 8]
    short, _ = split_contexts(plan(longest=1000), RULES)
    assert short.splits[0].parts == 7


def test_latents_are_cut_whatever_the_number_of_heads() -> None:
    """A thread block computes 32 heads of one token."""
    given = plan(kv_heads=1)
    cache = dataclasses.replace(given.caches[0], head_dim=576, latent=512)
    steps = [
        dataclasses.replace(each, op="latent_attention", attrs={**each.attrs, "heads": 40})
        if each.op == "paged_attention"
        else each
        for each in given.steps
    ]
    made, report = split_contexts(dataclasses.replace(given, caches=(cache,), steps=tuple(steps)), RULES)
    assert report.refused == {}
    assert [made.parts_of(items, 1 << 20) for items in (1, 2, 4, 40)] == [64, 64, 32, 3]


def test_steps_without_items_have_whole_contexts() -> None:
    made, _ = split_contexts(plan(), RULES)
    assert made.parts_of(0, 0) == 1
    assert plan().parts_of(1, 1 << 20) == 1, "a plan without splits"


@pytest.mark.parametrize(
    ("given", "rules", "reason"),
    [
        (plan(dtype=DType.F32), RULES, "no kernel reads a KV cache in f32 in parts"),
        (plan(decode_tokens=0), dataclasses.replace(RULES, group=1), "more than 1 query heads share a KV head"),
        (plan(longest=255), RULES, "no context has 256 tokens"),
    ],
)
def test_refusals(given: Plan, rules: SplitRules, reason: str) -> None:
    made, report = split_contexts(given, rules)
    assert (made, report.fired, report.refused) == (given, 0, {reason: 1})


def test_odd_splits_are_refused() -> None:
    """Kernels write the results of parts where the splits of a plan say that they fit."""
    made, _ = split_contexts(plan(), RULES)
    for splits in (made.splits[:-1], made.splits[::-1], (made.splits[0], *made.splits)):
        with pytest.raises(EngineError, match=r"splits(.|\n)*more and more up to 40"):
            check_plan(dataclasses.replace(made, splits=splits))


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [("cuda/sm80", 108), ("cuda/sm90", 132), ("cuda/sm89", 142), ("tensorrt-rtx/sm89", 142), ("tensorrt-rtx", 170)],
)
def test_a_target_fills_its_largest_gpu(name: str, multiprocessors: int) -> None:
    made = plan(batch=600, kv_heads=1)
    first, *_ = plan_passes(find_target(name))
    made, report = first(made)
    assert report.name == "split_contexts"
    assert {items: made.parts_of(items, 1 << 20) for items in (1, 33, 600)} == {
        1: 64,
        33: 4 * multiprocessors // 33,
        600: max(1, 4 * multiprocessors // 600),
    }


def test_cpu_targets_have_no_such_pass() -> None:
    for name in ("ref", "cpu/avx2"):
        assert plan_passes(find_target(name)) == ()
