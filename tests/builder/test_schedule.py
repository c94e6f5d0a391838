"""The passes over the calls of a plan: what they change, why they leave the rest, and that all steps stay covered."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from ingot.builder.passes.base import PassReport
from ingot.builder.schedule import Dump, schedule, schedule_calls
from ingot.dtypes import DType
from ingot.plan import Attr, Buffer, CacheGroup, Limits, Plan, Rows, Step, Variant, Weight, WeightSlice
from ingot.plan_check import check_plan
from ingot.plan_json import plan_from_json
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import CallRules
from ingot.step_inputs import inputs_among

ROWS, FEW = 8, 4
COLS = {"x": 8, "y": 8, "n": 8, "m": 8, "qkv": 16, "q": 8, "a": 8, "s": 8, "logits": 10}
KERNELS = {"matmul": "matmul.w8a8.here", "plain": "matmul.f32.here"}
BY_ROWS = frozenset({"rms_norm", "embedding", "add"})
RULES = CallRules(norming=frozenset({KERNELS["matmul"]}), by_rows=BY_ROWS, private_elements=FEW * 8)
HEAD_DIM = 4


@dataclasses.dataclass(frozen=True)
class Line:
    """A step in short: norms read their weight w, products another one."""

    name: str
    op: str
    reads: str
    writes: str
    also: str = ""  # another input, or of a norm another output

    def step(self) -> Step:
        attrs: dict[str, Attr] = {"head_dim": HEAD_DIM} if self.op == "rope_kv_write" else {}
        inputs: tuple[str, ...] = {
            "embedding": ("w", ""),
            "rms_norm": (self.reads, "w", ""),
            "matmul": (self.reads, "w", "", self.also),
            "plain": (self.reads, "w", "", self.also),
            "rope_kv_write": (self.reads, "", self.also, ""),
            "paged_attention": (self.reads,),
            "add": (self.reads, self.also),
        }[self.op]
        outputs = (self.writes, self.also) if self.op == "rms_norm" else (self.writes,)
        op = "matmul" if self.op == "plain" else self.op
        kernel = KERNELS.get(self.op, f"{op}.f32.here")
        read = find_op(op).with_batch(inputs)
        return Step(name=self.name, op=op, kernel=kernel, inputs=read, outputs=outputs, attrs=attrs)


LAYER = [
    Line("embed", "embedding", "", "x"),
    Line("norm", "rms_norm", "x", "n"),
    Line("qkv", "matmul", "n", "qkv"),
    Line("write", "rope_kv_write", "qkv", "q"),
    Line("attention", "paged_attention", "q", "a"),
    Line("out", "matmul", "a", "y", "x"),
    Line("last", "rms_norm", "y", "m"),
    Line("head", "matmul", "m", "logits"),
]


def plan_of(lines: Sequence[Line], over: dict[str, str] | None = None) -> Plan:
    """Every buffer lies in a place of its own, but for those of `over`, which lie over others."""
    places = {name: 1024 * i for i, name in enumerate(COLS)}
    places |= {name: places[other] for name, other in (over or {}).items()}
    buffers = tuple(Buffer(name=name, rows=Rows.TOKENS, cols=COLS[name], offset=places[name]) for name in COLS)
    logits = dataclasses.replace(buffers[-1], rows=Rows.LOGITS)
    weights = tuple(
        Weight(
            name=name,
            dtype=DType.F32,
            shape=(length,),
            layout="row",
            nbytes=4 * length,
            pieces=(WeightSlice(begin=0, end=length, offset=offset),),
        )
        for name, length, offset in (("w", 8, 0), ("per_head", HEAD_DIM, 64), ("per_token", 2 * HEAD_DIM, 128))
    )
    limits = Limits(max_batch_size=4, max_input_len=8, max_seq_len=9, max_num_tokens=ROWS, max_logit_rows=ROWS)
    steps = tuple(line.step() for line in lines)
    return Plan(
        inputs=inputs_among({name for step in steps for name in step.inputs}),
        vocab_size=COLS["logits"],
        max_positions=8,
        limits=limits,
        caches=(CacheGroup(layers=(0,), kv_heads=1, head_dim=HEAD_DIM, tokens_per_block=16, dtype=DType.F32),),
        buffers=(*buffers[:-1], logits),
        weights=weights,
        steps=steps,
        arena_bytes=places["logits"] + -(-ROWS * 4 * COLS["logits"] // 64) * 64,
        weight_bytes=192,
        logits="logits",
        draw_kernel="sample.f32.avx2",
    )


def scheduled(lines: Sequence[Line], over: dict[str, str] | None = None) -> tuple[Plan, dict[str, PassReport]]:
    """The plan, and the reports by name."""
    dump = Dump(None, 1)
    plan = schedule_calls(plan_of(lines, over), RULES, dump)
    return plan, {report.name: report for report in dump.reports}


def drawn(variant: Variant) -> str:
    """norm* is computed by every thread, norm+qkv in one call; | stands for a barrier."""
    words = ["+".join((*call.inside, call.step)) + "*" * call.private + " |" * call.waits for call in variant.calls]
    return " ".join(words)


def changed(**steps: Line) -> list[Line]:
    """The layer with other steps."""
    return [steps.get(line.name, line) for line in LAYER]


def test_a_layer() -> None:
    plan, reports = scheduled(LAYER)
    few, many = plan.variants
    assert (few.name, few.most_tokens, many.name, many.most_tokens) == ("few", FEW, "many", ROWS)
    assert drawn(few) == "embed | norm* qkv | write | attention | out | last* head |"
    assert drawn(many) == "embed | norm+qkv | write | write+attention | out | last+head |"
    assert [call.step for call in few.calls if call.reads_private] == ["qkv", "head"]
    assert [call.step for call in many.calls if call.kv_only] == ["write"]
    assert {name: report.fired for name, report in reports.items()} == {
        "few.private_rows": 2,
        "few.place_barriers": 2,
        "many.fold_norms": 2,
        "many.fold_rotation": 1,
        "many.place_barriers": 0,
    }
    check_plan(plan)
    assert plan_from_json(plan.to_json()) == plan


FOLD_NORMS = {
    "the product's kernel prepares no rows": (changed(qkv=Line("qkv", "plain", "n", "qkv")), {}),
    "several products read it": ([*LAYER[:3], Line("more", "matmul", "n", "s"), *LAYER[3:]], {}),
    "not only products read it": ([*LAYER[:3], Line("sum", "add", "n", "s", "x"), *LAYER[3:]], {}),
    "its sum is wanted as well": (changed(norm=Line("norm", "rms_norm", "x", "n", "s")), {}),
    "another norm comes before one of its readers": (
        [*LAYER[:2], Line("second", "rms_norm", "x", "s"), LAYER[2], Line("more", "plain", "s", "y"), *LAYER[3:]],
        {},
    ),
    "no kernel call reads it": ([*LAYER[:2], Line("second", "rms_norm", "x", "s"), *LAYER[2:]], {}),
    "what it norms is written over before the product ends": (LAYER, {"qkv": "x"}),
}


@pytest.mark.parametrize("reason", FOLD_NORMS)
def test_norms_that_are_not_folded(reason: str) -> None:
    lines, over = FOLD_NORMS[reason]
    plan, reports = scheduled(lines, over)
    assert reports["many.fold_norms"].refused[reason] >= 1
    if reason != "no kernel call reads it":
        assert "norm" in plan.variants[1].called()


FOLD_ROTATION: dict[str, tuple[list[Line], dict[str, str]]] = {
    "the next kernel call is not its attention": ([*LAYER[:4], Line("more", "plain", "x", "s"), *LAYER[4:]], {}),
    "a norm takes several heads together": (changed(write=Line("write", "rope_kv_write", "qkv", "q", "per_token")), {}),
    "attention writes over what the queries are made of": (LAYER, {"a": "qkv"}),
    "another kernel call reads the queries too": ([*LAYER[:5], Line("more", "plain", "q", "s"), *LAYER[5:]], {}),
}


@pytest.mark.parametrize("reason", FOLD_ROTATION)
def test_rotations_that_are_not_folded(reason: str) -> None:
    plan, reports = scheduled(*FOLD_ROTATION[reason])
    report = reports["many.fold_rotation"]
    assert (report.fired, dict(report.refused)) == (0, {reason: 1})
    assert not any(call.kv_only for call in plan.variants[1].calls)
    assert plan.variants[1].inside() == {"norm", "last"}


def test_a_norm_of_each_head_is_folded() -> None:
    _, reports = scheduled(changed(write=Line("write", "rope_kv_write", "qkv", "q", "per_head")))
    assert reports["many.fold_rotation"].fired == 1


def test_rows_that_others_read_too_are_no_thread_s_own() -> None:
    plan, reports = scheduled([*LAYER[:3], Line("sum", "add", "n", "s", "x"), *LAYER[3:]])
    assert reports["few.private_rows"].refused == {"not only products read it": 1}
    assert drawn(plan.variants[0]).startswith("embed | norm | qkv sum | write |")


def test_several_products_take_the_rows_of_one_norm() -> None:
    plan, reports = scheduled([*LAYER[:3], Line("more", "plain", "n", "s"), *LAYER[3:]])
    assert reports["few.place_barriers"].refused["both share the team's scratch and numbers"] == 2
    assert drawn(plan.variants[0]).startswith("embed | norm* qkv | more | write |")
    assert [call.step for call in plan.variants[0].calls if call.reads_private] == ["qkv", "more", "head"]


def test_where_threads_wait() -> None:
    """What lies over the bytes that another call uses waits for it."""
    between = [*LAYER[:5], Line("sum", "add", "x", "s", "x"), *LAYER[5:]]
    plan, _ = scheduled(between)
    assert "attention sum | out" in drawn(plan.variants[0])
    plan, reports = scheduled(between, {"s": "q"})
    assert "attention | sum out" in drawn(plan.variants[0])
    kept = reports["few.place_barriers"].refused
    assert kept["one writes over what another used"] == 1
    assert kept["one reads what another wrote"] == 4


def test_wide_rows_have_one_variant_and_small_limits_too() -> None:
    plan = plan_of(LAYER)
    wide = schedule_calls(plan, dataclasses.replace(RULES, private_elements=7))
    assert [each.name for each in wide.variants] == ["many"]
    small = schedule_calls(plan, dataclasses.replace(RULES, private_elements=1 << 20))
    assert [(each.name, each.most_tokens) for each in small.variants] == [("few", ROWS)]


def test_targets_that_ask_for_none_have_none() -> None:
    plan = plan_of(LAYER)
    for name in ("ref", "cuda/sm90"):
        assert schedule(plan, find_target(name)) is plan


def test_every_step_is_there_once() -> None:
    """Whatever a pass does: of all sets of two changes above."""
    for (lines, over), (_, more) in itertools.product(FOLD_NORMS.values(), FOLD_ROTATION.values()):
        plan, _ = scheduled(lines, {**over, **more})
        for variant in plan.variants:
            covered(plan, variant)


def covered(plan: Plan, variant: Variant) -> None:
    """Every step has a call, or is computed in one that comes later; rope_kv_write may be both."""
    order = {step.name: i for i, step in enumerate(plan.steps)}
    calls = [order[call.step] for call in variant.calls]
    assert calls == sorted(set(calls))
    inside = [(order[name], order[call.step]) for call in variant.calls for name in call.inside]
    assert all(one < other for one, other in inside)
    split = [i for i, _ in inside if plan.steps[i].op == "rope_kv_write"]
    assert sorted(calls + [i for i, _ in inside if i not in split]) == list(range(len(plan.steps)))
    assert set(split) <= set(calls)
    assert variant.calls[-1].waits


def test_plans_are_dumped_after_each_pass(tmp_path: Path) -> None:
    dump = Dump(tmp_path, 7)
    plan = schedule_calls(plan_of(LAYER), RULES, dump)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == len(dump.reports) == 5
    assert files[0].startswith("07_few.private_rows.json")
    assert (tmp_path / files[-1]).read_text() == plan.to_json() + "\n"
