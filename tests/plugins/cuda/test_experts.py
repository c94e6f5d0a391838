"""Mixtures of experts on the emulated GPU: which are chosen, their products at odd shapes, and the same bits for a row
whatever the other rows take."""

import ctypes
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.devices import devices_of
from ingot.plugins.cuda.estimate import _nowhere, step_ops
from ingot.plugins.cuda.experts import MAX_EXPERTS, sort_tiles
from ingot.plugins.cuda.plan_facts import scratch_bytes
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.step_work import Load
from ingot.weight_formats import FORMATS
from tests.plugins.cpu.one_step import Input, Packed, Quantised, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.plugins.ops.calls import random_f8, random_grouped, random_units

PRECISIONS = (
    *("bf16", "f32", "w8", "w4g32", "w2tg16", "w3tg32", "w4tg32", "w4tsg16", "w8tg64", "w8tsg128"),
    *("w2ksg16", "w3kg16", "w4ksg32", "w5ksg32", "w6kg16", "w6kg32", "f8g32", "f8"),
)
ROWS = (1, 7, 20, 110)  # of 3 experts, of which each row takes two: each kernel computes some
GATE_UP, DOWN = "moe_gate_up", "moe_down"
ROUTE: dict[str, Attr] = {
    "normalized": 1,
    "score": "softmax",
    "eps": 0.0,
    "floor": 0.0,
    "scale": 1.0,
    "groups": 1,
    "group_top": 1,
    "group_best": 2,
}


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _ids(rows: int, experts: int, slots: int) -> Array:
    """Ascending, as moe_route gives them; the last expert is taken by few."""
    random = np.random.default_rng(experts)
    chances = np.arange(2 * experts, experts, -1) / np.arange(2 * experts, experts, -1).sum()
    found = [np.sort(random.choice(experts, slots, replace=False, p=chances)) for _ in range(rows)]
    return np.stack(found).astype(np.float32)


def _weight(precision: str, experts: int, n: int, k: int, *, gated: bool) -> Packed:
    dtype, _, group = precision.partition("g")
    if dtype == "f8":
        return Quantised.of(random_f8((experts, n, k), int(group or 0)), gated=gated)
    if dtype not in FORMATS:
        return Packed(values=_normal(k, experts, n, k) / np.float32(k**0.5), dtype=DType(dtype))
    if FORMATS[dtype].unit_bytes:
        return Quantised.of(random_units(dtype, (experts, n, k), int(group)), gated=gated)
    if "t" in dtype:
        shift, byte_codes = ("zero" if k % 8 else "offset") if dtype.endswith("s") else "", dtype.startswith("w8")
        bits = FORMATS[dtype].bits
        more_bits = bits == 4 and k % 8 > 0
        kept = random_grouped(
            (experts, n, k), int(group), shift, more_bits=more_bits, byte_codes=byte_codes, bits=min(bits, 4)
        )
        return Quantised.of(kept, gated=gated)
    random = np.random.default_rng(n + k)
    scale = random.uniform(0.001, 0.02, (experts, n)).astype(np.float32)
    if not group:
        codes = random.integers(-127, 128, (experts, n, k)).astype(np.int8)
        return Quantised.of(QuantisedRows(scale=scale, codes=codes), gated=gated)
    shape = (experts, n, -(-k // int(group)))
    rows = QuantisedRows(
        scale=scale,
        codes=random.integers(-8, 8, (experts, n, k)).astype(np.int8),
        multipliers=(random.integers(1, 16, shape) * random.choice([-1, 1], shape)).astype(np.int8),
        group=int(group),
    )
    return Quantised.of(rows, gated=gated)


def product(
    driver: ctypes.CDLL,
    op: str,
    precision: str,
    rows: int,
    *,
    n: int,
    k: int,
    which: int,
    experts: int = 3,
    slots: int = 2,
    kind: str = "sm80",
    limit: float = 1.5,
) -> tuple[Array, Array]:
    """What kernels and reference make of the first rows of one input. n: columns of a result. which: bias and gate.
    kind: "sm90a" for warpgroups. limit: of gates with biases."""
    gated, biased = op == GATE_UP and which % 3 > 0, which % 2 == 1
    weight = _weight(precision, experts, 2 * n if gated else n, k, gated=gated)
    dtype = precision.partition("g")[0]
    attrs: dict[str, Attr] = {"activations": "bf16" if dtype in FORMATS else dtype, "group": weight.group}
    bias = Packed(values=_normal(3, experts * weight.shape[1])) if biased else None
    ids = _ids(200, experts, slots)[:rows]
    inputs: list[Input] = [_normal(1, 200, k if op == GATE_UP else slots * k)[:rows], ids, weight, bias]
    if op == DOWN:
        inputs.insert(2, np.abs(_normal(2, 200, slots))[:rows])
    else:
        clamped = {"limit": limit if gated and biased else 0.0, "alpha": 1.702}
        attrs |= {"activation": "silu" if gated else "relu2", "gated": int(gated), **clamped}
    kernel, batch, kv = f"{op}.{dtype}.{kind}", plain_batch(rows), DType(str(attrs["activations"]))
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    (found,) = run_step(driver, kernel, inputs, attrs, batch, kv=layout_of(kv), pieces=1 + which % 2)
    return found, expected


def check(driver: ctypes.CDLL, op: str, precision: str, every: int = 1) -> None:
    """All kernels with odd shapes; every: only each so many of the cases."""
    shapes = ((33, 40), (17, 100), (72, 24))
    cases = [(rows, *shape) for rows in ROWS for shape in shapes]
    for which, (rows, n, k) in [*enumerate(cases)][::every]:
        found, expected = product(driver, op, precision, rows, n=n, k=k, which=which)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=8e-6 * scale, err_msg=f"{rows} {n} {k} {which}")


def check_bits(driver: ctypes.CDLL, op: str, precision: str) -> None:
    """A row alone, and in each kernel."""
    which = 1 if op == DOWN else 5
    alone, _ = product(driver, op, precision, 1, n=20, k=300, which=which)
    for rows in ROWS[1:]:
        found, _ = product(driver, op, precision, rows, n=20, k=300, which=which)
        assert found[:1].tobytes() == alone.tobytes(), f"{rows} rows"


@pytest.mark.slow
@pytest.mark.parametrize("op", [GATE_UP, DOWN])
@pytest.mark.parametrize("precision", [*PRECISIONS, pytest.param("f16", marks=pytest.mark.slow)])
def test_products_of_experts(gpu: ctypes.CDLL, op: str, precision: str) -> None:
    check(gpu, op, precision, 2 if precision in ("bf16", "w4g32") else 3)


@pytest.mark.daily(1)
@pytest.mark.parametrize("op", [GATE_UP, DOWN])
@pytest.mark.parametrize(("experts", "slots"), [(300, 2), (300, 40), (5, 5), (1, 1)])
def test_numbers_of_experts(gpu: ctypes.CDLL, op: str, experts: int, slots: int) -> None:
    """More than a block that sorts has threads, most of them without rows; all of them; a single one."""
    for rows in (1, 9):
        found, expected = product(gpu, op, "bf16", rows, n=9, k=24, which=1, experts=experts, slots=slots)
        np.testing.assert_allclose(found, expected, rtol=0, atol=8e-6 * max(1.0, float(np.abs(expected).max())))


SAME_BITS = {  # the long ones read codes as others do
    "bf16": (),
    **dict.fromkeys(("w2tg16", "w2ksg16", "w3kg16", "w4ksg32", "w6kg32"), (pytest.mark.slow, pytest.mark.long)),
}


@pytest.mark.parametrize("op", [GATE_UP, DOWN])
@pytest.mark.parametrize(
    "precision", [pytest.param(each, marks=SAME_BITS.get(each, pytest.mark.slow)) for each in PRECISIONS]
)
def test_a_row_has_the_same_bits_whatever_others_take(gpu: ctypes.CDLL, op: str, precision: str) -> None:
    check_bits(gpu, op, precision)


def test_the_rows_choose_among_the_kernels() -> None:
    """Those of the tests run each of them."""
    tiles = sort_tiles(3, 2, exact=False)
    chosen = [next(each.rows for each in tiles if rows <= each.most_rows) for rows in ROWS]
    assert set(chosen) == {each.rows for each in tiles} == {8, 64, 128}
    assert [each.most_rows for each in tiles[:-1]] == [4 * 3 // 2, 48 * 3 // 2], "on average of an expert"
    assert tiles[-1].most_rows > 1 << 20


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_rows_are_sorted_by_expert(gpu: ctypes.CDLL, dtype: DType) -> None:
    """For tiles of each size."""
    for rows in ROWS:
        ids = _ids(rows, 3, 2)
        batch, attrs = plain_batch(rows), {"experts": 3}
        (expected,) = reference_outputs("sort_by_expert.f32.sm80", [ids], attrs, batch)
        (found,) = run_step(gpu, "sort_by_expert.f32.sm80", [ids], attrs, batch, kv=layout_of(dtype))
        np.testing.assert_array_equal(found.reshape(-1)[: ids.size], expected.reshape(-1)[: ids.size])


def routes() -> Iterator[tuple[list[Input], dict[str, Attr]]]:
    """Each attribute; equal logits; as many experts and groups as lanes can remember; NaN and infinity."""
    logits = _normal(5, 9, 65)
    tied = (np.round(logits * 2) / 2).astype(np.float32)
    bias = Packed(values=_normal(6, 65))
    yield [logits, None], {**ROUTE, "per_token": 8}
    yield [tied, None], {**ROUTE, "per_token": 33, "normalized": 0, "scale": 2.5}
    yield [tied, bias], {**ROUTE, "per_token": 6, "score": "sigmoid", "eps": 1e-20, "scale": 2.5}
    yield [logits, bias], {**ROUTE, "per_token": 4, "floor": 0.9}
    many = _normal(7, 5, 256)
    grouped: dict[str, Attr] = {"groups": 8, "group_top": 4, "per_token": 8}
    yield [many, Packed(values=_normal(8, 256))], {**ROUTE, **grouped, "score": "sigmoid", "eps": 1e-20}
    yield [many, None], {**ROUTE, **grouped, "group_best": 1}
    yield [np.round(many).astype(np.float32), None], {**ROUTE, **grouped, "group_best": 3, "normalized": 0}
    most = np.round(_normal(10, 2, MAX_EXPERTS) * 4) / np.float32(4)
    yield [most, None], {**ROUTE, "per_token": 40}
    yield [most, None], {**ROUTE, "groups": 64, "group_top": 2, "per_token": 32, "score": "sigmoid"}  # all of them
    odd = _normal(9, 4, 5)
    odd[0, 2], odd[1, 1], odd[2, :] = np.nan, np.inf, -np.inf
    yield [odd, None], {**ROUTE, "per_token": 2}
    yield [odd, None], {**ROUTE, "per_token": 5, "score": "sigmoid", "normalized": 0}


def check_routes(driver: ctypes.CDLL, every: int = 1) -> None:
    for inputs, attrs in [*routes()][::every]:
        assert isinstance(inputs[0], np.ndarray)
        batch = plain_batch(len(inputs[0]))
        ids, weights = reference_outputs("moe_route.f32.sm80", inputs, attrs, batch)
        found = run_step(driver, "moe_route.f32.sm80", inputs, attrs, batch, kv=layout_of(DType.BF16))
        np.testing.assert_array_equal(found[0], ids, str(attrs))
        np.testing.assert_allclose(found[1], weights, rtol=2e-6, atol=1e-7, err_msg=str(attrs))


def test_routes(gpu: ctypes.CDLL) -> None:
    check_routes(gpu)


def test_what_all_rows_add(gpu: ctypes.CDLL) -> None:
    """Each row with a gate of its own."""
    inputs: list[Input] = [_normal(1, 5, 300), _normal(2, 5, 300), _normal(3, 5, 1)]
    (expected,) = reference_outputs("add_gated.f32.sm80", inputs, {}, plain_batch(5))
    (found,) = run_step(gpu, "add_gated.f32.sm80", inputs, {}, plain_batch(5), kv=layout_of(DType.BF16))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_rows_that_are_not_sorted_are_refused(tmp_path: Path) -> None:
    """Lists of another choice, and none at all; the build's own are taken."""
    (tmp_path / "config.json").write_text(json.dumps(dict(find_family("mixtral").tiny)))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    options = BuildConfig(target="cuda/sm90", precision="bf16", dry_run=True)
    plan = build(options, tmp_path / "c", tmp_path / "e").plan
    bind(plan, _nowhere(plan))
    without = tuple(each for each in plan.steps if each.op != "sort_by_expert")
    of_more = tuple(
        dataclasses.replace(each, attrs={"experts": 99}) if each.op == "sort_by_expert" else each for each in plan.steps
    )
    for steps, got in ((without, "got: none"), (of_more, "for 99 experts")):
        changed = dataclasses.replace(plan, steps=steps)
        with pytest.raises(EngineError, match=rf"sorted before(.|\n)*layers.0/moe_gate_up(.|\n)*{got}"):
            bind(changed, _nowhere(changed))


def test_the_estimate_counts_the_experts_that_are_read(tmp_path: Path) -> None:
    """Of a few rows: those that they may take; of many: all."""
    config = {**find_family("qwen3_moe").tiny, "num_experts": 64, "num_experts_per_tok": 2, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    options = BuildConfig(target="cuda/sm90", precision="bf16", gemm_library=False, dry_run=True)
    plan = build(options, tmp_path / "c", tmp_path / "e").plan
    assert scratch_bytes(plan).sums == 4 * plan.limits.max_num_tokens * 2 * 256, "what is added up: two rows of each"
    (weight,) = {each.nbytes for each in plan.weights if each.name.endswith("/moe_gate_up.weight")}
    for rows, least, most in ((1, 2 / 64, 2 / 64), (16, 0.35, 0.5), (2048, 1, 1)):
        load = Load(sequences=[(0, rows)], logit_rows=1)
        (device, *_) = devices_of("sm_90a")
        first = next(each for each in step_ops(plan, device, load) if each.op == GATE_UP)
        beside = 4 * rows * (256 + 2 + 2 * int(str(config["moe_intermediate_size"])))  # as float32
        assert least * weight <= first.nbytes <= most * weight + beside
        assert first.kernels == (f"experts_{8 if rows < 2048 else 128}",)
        sorts = next(each for each in step_ops(plan, device, load) if each.op == "sort_by_expert")
        assert (sorts.kernels, sorts.launches) == (("group_by_expert",), 1)
