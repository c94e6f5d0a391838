"""Every tolerance of `verify --against`: an error just inside it passes, one just outside is found."""

import dataclasses

import numpy as np
import pytest

from ingot.builder.evaluate import Evaluation
from ingot.builder.expressions import WeightReader
from ingot.builder.graph import Graph
from ingot.builder.source import open_source
from ingot.checkpoint import Checkpoint
from ingot.compare.derived import _differ
from ingot.compare.ops import KvPools, OutputError, StepChecker
from ingot.compare.packed import PackedWeights
from ingot.compare.ranks import Rank
from ingot.compare.run import Run
from ingot.compare.tokens import read_tokens
from ingot.compare.walk import TensorError
from ingot.compare.weights import _not_the_nearest
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.plan import Plan, Step
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import Int32, StepBatch
from tests.hall.planted import step_named
from tests.hall.test_compare import Built
from tests.hall.test_compare_hard import changed, llama

__all__ = ["llama"]  # a fixture

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 16, 16
ONE = np.ones((1, HEADS * DIM), np.float32)


def checker(llama: Built, kv: DType, count: int = 1) -> tuple[StepChecker, Plan]:
    """For a step of `count` tokens."""
    with open_engine(llama.engine("ref-f32")) as opened:
        plan = dataclasses.replace(
            opened.plan,
            caches=tuple(
                dataclasses.replace(each, dtype=kv, kv_heads=KV_HEADS, head_dim=DIM, tokens_per_block=TOKENS)
                for each in opened.plan.caches
            ),
        )
        batch = StepBatch(
            ids=np.zeros(count, np.int32),
            query_starts=np.array([0, count], np.int32),
            past_lengths=np.zeros(1, np.int32),
            block_tables=np.zeros((1, 1, 1), np.int32),
            slots=np.full(1, -1, np.int32),
            draws=np.empty(0, np.int32),
            logit_rows=np.arange(count, dtype=np.int32),
        )
        return StepChecker(PackedWeights(plan, opened.weights.copy()), plan, batch, 1), plan


def rounding(width: int) -> float:
    """Of float32 sums of so many numbers, as docs/verify.md has it."""
    return float(2.0**-24 * (32 + 4 * width**0.5))


def require_bound(check: OutputError, bound: float) -> None:
    """Of a check of an error of 0.9 of the bound that it should have."""
    assert check.bound == pytest.approx(bound, rel=0.08)
    assert check.ratio == pytest.approx(0.9, rel=0.08)


def test_a_float32_kernel(llama: Built) -> None:
    """A sum of two rows: all roundings of the larger input, and half of those of the result."""
    checked, plan = checker(llama, DType.F32)
    y = plan.buffers[0].name
    step = Step(name="s", op="add", kernel="add.f32.ref", inputs=("a", "b"), outputs=(y,), attrs={})
    bound = 1.5 * rounding(4096)
    ones = np.ones((1, 4096), np.float32)
    got = ones.copy()
    got[0, 7] += 0.9 * bound
    require_bound(checked.check(step, {"a": ones, "b": 0 * ones}, {y: got}, None), bound)
    got[0, 7] = 1 - 1.1 * bound
    assert checked.check(step, {"a": ones, "b": 0 * ones}, {y: got}, None).ratio > 1


@pytest.mark.parametrize(
    ("kernel", "dtype", "relative"),
    [
        ("paged_attention.bf16.avx512", DType.BF16, 0.0),
        ("paged_attention.bf16.avx512bf16", DType.BF16, 2.0**-6),
        ("paged_attention.bf16.amx", DType.BF16, 2.0**-6),
        ("paged_attention.f16.sm80", DType.F16, 2.0**-9),
        ("paged_attention.f32.sm80", DType.F32, 0.0),
    ],
)
def test_attention_with_and_without_matrix_units(kernel: str, dtype: DType, relative: float, llama: Built) -> None:
    """Of one token, whose value it is. Matrix units: four halves of a step of the cache's type."""
    checked, plan = checker(llama, dtype)
    step = dataclasses.replace(step_named(plan, "layers.0/attention"), kernel=kernel)
    attrs = {**step.attrs, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "layer": 0}
    step = dataclasses.replace(step, attrs=attrs)
    pool = np.ones((1, KV_HEADS, TOKENS, DIM), np.float32)
    bound = relative + 1.5 * rounding(HEADS * DIM + 1)
    for size in (0.9, 1.15):
        got = ONE.copy()
        got[0, 5] += size * bound
        check = checked.check(step, {step.inputs[0]: ONE}, {step.outputs[0]: got}, KvPools(keys=pool, values=pool))
        assert check.bound == pytest.approx(bound, rel=0.08)
        assert (check.ratio > 1) == (size > 1)


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize(
    ("dtype", "relative"),
    [
        (DType.F32, 0.0),
        (DType.BF16, 2.0**-7),
        (DType.F16, 2.0**-10 + 2.0**-24),
        (DType.I8, 1 / 127),
        (DType.F8, 2.0**-3),
    ],
)
def test_keys_and_values(dtype: DType, relative: float, what: str, llama: Built) -> None:
    """One step of the cache's type, and what a float32 kernel may be off."""
    checked, plan = checker(llama, dtype)
    attrs = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "layer": 0, "rotary_dim": 0, "interleaved": 0}
    known, read = step_named(plan, "layers.0/rope_kv_write"), find_op("rope_kv_write").with_batch(["qkv"])
    step = dataclasses.replace(known, attrs={**known.attrs, **attrs}, inputs=read)
    columns = (HEADS + 2 * KV_HEADS) * DIM
    bound = relative + 1.5 * rounding(columns)
    for size in (0.9, 1.15):
        pools = {name: np.full((1, KV_HEADS, TOKENS, DIM), np.nan, np.float32) for name in ("keys", "values")}
        for pool in pools.values():
            pool[:, :, 0] = 1
        pools[what][0, 1, 0, 3] += size * bound
        check = checked.check(
            step, {"qkv": np.ones((1, columns), np.float32)}, {step.outputs[0]: ONE}, KvPools(**pools)
        )
        assert (check.ratio > 1) == (size > 1)
        assert check.ratio == pytest.approx(size, rel=0.08)
        assert check.what == what


def test_what_products_read_may_be_half_a_step_off_where_it_is_stored_so(llama: Built) -> None:
    """A norm of ones; bf16 has 1, then 1 + 2^-7."""
    wide, plan = checker(llama, DType.F32)
    step = dataclasses.replace(step_named(plan, "layers.0/attention_norm"), attrs={"eps": 0.0})
    buffers = (
        dataclasses.replace(each, dtype=DType.BF16) if each.name == step.outputs[0] else each for each in plan.buffers
    )
    packed = wide._packed
    checked = StepChecker(packed, dataclasses.replace(plan, buffers=tuple(buffers)), wide._batch, 1)
    x = np.ones((1, 48), np.float32)
    for share, stored, right in ((0.45, 0, True), (0.55, 0, False), (0.55, 1, True), (0.45, 1, False)):
        weight = np.full(48, 1 + share * 2.0**-7, np.float32)
        packed.whole = lambda name, weight=weight: weight  # type: ignore[method-assign, misc]
        y = np.full((1, 48), 1 + stored * 2.0**-7, np.float32)
        check = checked.check(step, {step.inputs[0]: x}, {step.outputs[0]: y}, None)
        assert (check.ratio <= 1) == right
    assert wide.check(step, {step.inputs[0]: x}, {step.outputs[0]: y}, None).bound < 1e-5


@pytest.mark.parametrize(
    ("value", "code", "right"),
    [
        (5.49, 5, True),
        (5.51, 5, False),
        (-5.51, -6, True),
        (0.51, 0, False),
        (127.49, 127, True),
        (127 * 3.9, 127, True),
        (127 * 4.1, 127, False),
        (127 * 3.9, 126, False),
        (-127 * 3.9, -127, True),
    ],
)
def test_the_nearest_integer_of_w8(value: float, code: int, right: bool) -> None:
    """Half a step; what a search has clipped is at most four times the outermost integer."""
    scale = np.float32(0.25)
    rows = QuantisedRows(codes=np.array([[code, 1]], np.int8), scale=np.array([scale]))
    wanted: Array = np.array([[value, 1]], np.float32) * scale
    at, expected, bound = _not_the_nearest(wanted, rows.values, rows)
    assert (len(at[0]) == 0) == right
    if not right:
        assert bound[0] == pytest.approx(0.5 * scale, rel=2e-3)
        assert expected[0] == pytest.approx(np.clip(value, -127, 127) * scale if value < 500 else value * scale)


@pytest.mark.parametrize(("off", "right"), [(0.9, True), (1.1, False)])
def test_an_offset_of_a_group_without_a_scale(off: float, right: bool) -> None:
    """K-quants have groups of one value: their offset is rounded to float16, which moves it by 2^-11 at most."""
    rows = GroupedRows(
        scale=np.full(1, 2, np.float32),
        codes=np.zeros((1, 16), np.uint8),
        group_scale=np.zeros((1, 1), np.float32),
        table=np.arange(16, dtype=np.int8)[None],
        shift=np.full((1, 1), -3, np.float32),
        is_offset=np.ones(1, np.bool_),
        group=16,
    )
    wanted: Array = rows.values * np.float32(1 + off * 2.0**-11)
    at, _, _ = _not_the_nearest(wanted, rows.values, rows)
    assert (len(at[0]) == 0) == right


def test_every_slot_that_was_written_is_compared(llama: Built) -> None:
    """Two tokens: a wrong value of the second one; what is in slots of no token does not matter."""
    checked, plan = checker(llama, DType.F32, count=2)
    attrs = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "layer": 0, "rotary_dim": 0, "interleaved": 0}
    known, read = step_named(plan, "layers.0/rope_kv_write"), find_op("rope_kv_write").with_batch(["qkv"])
    step = dataclasses.replace(known, attrs={**known.attrs, **attrs}, inputs=read)
    inputs = {"qkv": np.ones((2, (HEADS + 2 * KV_HEADS) * DIM), np.float32)}
    for slot, wrong in ((0, True), (1, True), (2, False)):
        keys, values = (np.ones((1, KV_HEADS, TOKENS, DIM), np.float32) for _ in range(2))
        values[0, 1, slot, 3] = 7
        outputs = {step.outputs[0]: np.repeat(ONE, 2, axis=0)}
        assert (checked.check(step, inputs, outputs, KvPools(keys=keys, values=values)).ratio > 1) == wrong


def test_what_is_beyond_a_bound_is_a_finding(llama: Built) -> None:
    """Of a kernel, and of the model's values."""
    with open_engine(llama.engine("ref-f32")) as opened:
        plan = opened.plan
        tokens = read_tokens(llama.engine("ref-f32"), plan.vocab_size, 8, None, 8)
        session = RefSession(plan, opened.weights, SessionOptions(num_blocks=(8,)))
        with open_source(llama.checkpoint, plan, find_target("ref")) as source:
            for share, count in ((0.99, 0), (1.01, 1), (float("nan"), 1), (float("inf"), 1)):
                rank = Rank(opened, 0, source)
                run = Run(ranks=[rank], session=session, tokens=tokens, progress=lambda *_: None, threads=1)
                step, own = plan.steps[0], np.zeros((1, 1))
                run._check_model(step, TensorError(buffer="b", tensor="t", error=2 * share, bound=2, own=own))
                assert len(run._findings[step.name]) == count
                ratio = float(np.nan_to_num(share, nan=np.inf))
                error = OutputError(what="output", place="here", got=share, expected=0, bound=1, ratio=ratio)
                run._check_kernel(rank, step, error)
                assert len(run._findings[step.name]) == 2 * count


def test_scales_that_are_nan_in_both_are_alike() -> None:
    codes = np.ones((3, 2), np.int8)
    one, other = (
        QuantisedRows(codes=codes, scale=np.array(scales, np.float32))
        for scales in ((1, np.nan, np.nan), (1, np.nan, 1))
    )
    assert _differ(one, other).tolist() == [False, False, True]


def test_the_loss_by_another_expert_is_that_of_its_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The shares of a softmax over all experts, by hand."""
    model = changed(tmp_path_factory.mktemp("m"), {**MIXTRAL_OF_ONE, "num_experts_per_tok": 2})
    graph = Graph.load(model.checkpoint / "model.onnx")
    (softmax,) = (node for node in graph.nodes if node.op == "Softmax")
    logits, shares = softmax.inputs[0].name, softmax.outputs[0].name
    ids: Int32 = np.array([[1, 2, 3]], np.int32)
    with WeightReader(Checkpoint.open(model.checkpoint)) as reader:
        own = Evaluation(graph, reader, ids.astype(np.int64), {shares}).value(shares)
        order = np.argsort(-own, axis=-1)
        given = order[..., :2].copy()
        given[0, 1, 1], given[0, 2] = order[0, 1, 2], -1
        graph = Graph.load(model.checkpoint / "model.onnx")
        lost = Evaluation(graph, reader, ids.astype(np.int64), set(), 1, {logits: given}).choice(logits)
    second, third = own[0, 1, order[0, 1, 1]], own[0, 1, order[0, 1, 2]]
    assert lost == pytest.approx(np.array([[0, second - third, 0]]))
    assert lost[0, 1] > 1e-3


MIXTRAL_OF_ONE = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
}
