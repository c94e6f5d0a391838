"""Kernels of layers that keep a state, on the emulated GPU: against the references, with the states that they leave,
and the same bits alone, in batches and in chunks of any length."""

import contextlib
import ctypes
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.errors import BuildError, EngineError
from ingot.plan import Attr
from ingot.plugins.cuda.states import MAX_KEY_DIM
from ingot.plugins.op import Array, Call, StateCache
from ingot.plugins.registry import find_op
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import Input, Packed, batch_of, one_step_plan, plain_batch, reference_outputs
from tests.plugins.cuda import one_step
from tests.plugins.cuda.one_step import open_gpu, run_step
from tests.plugins.ops.calls import with_arrays
from tests.plugins.ops.states import state_group

TOLERANCE = 4e-6  # of the largest value
SLOTS = 9
STEPS = (  # of one session: (past, new) tokens of each sequence, and its slots
    ([(0, 5), (0, 37), (0, 1)], [[3], [-1, 1, 4], [0]]),
    ([(5, 1), (37, 1), (1, 1)], [[3], [-1, -1, 4], [0]]),  # in place
    ([(6, 20), (38, 1), (2, 2)], [[6, 3], [-1, 1, 5], [2]]),  # a snapshot of the first block; other slots
    ([(26, 1), (39, 12), (4, 13)], [[-1, 3], [-1, 1, 5, 7], [8, 2]]),  # the third one ends at its first block's end
)

CONVOLUTIONS: list[dict[str, Attr]] = [
    {"layer": 0, "channels": 36, "width": 4, "activation": "silu"},
    {"layer": 0, "channels": 37, "width": 3, "activation": "none"},
    {"layer": 0, "channels": 1100, "width": 2, "activation": "silu"},
]
LINEAR: dict[str, Attr] = {
    **{"layer": 0, "heads": 4, "key_heads": 2, "key_dim": 24, "value_dim": 40, "values_first": 0, "by_dim": 0},
    **{"scale": 0.25, "l2_eps": 1e-6, "dt_min": 0.0, "dt_max": 3.0e38},
}
MAMBA: dict[str, Attr] = {"values_first": 1, "l2_eps": 0.0, "scale": 1.0, "dt_min": 0.3, "dt_max": 1.5}
LINEARS: dict[str, dict[str, Attr]] = {
    "delta": LINEAR,
    "by_dim": {**LINEAR, "by_dim": 1, "heads": 2},
    "mamba": {**LINEAR, **MAMBA, "value_dim": 12},
    "odd": {**LINEAR, "key_dim": 15, "value_dim": 33, "heads": 2},
    "odd_values": {**LINEAR, **MAMBA, "key_dim": 8, "value_dim": 6, "heads": 3, "key_heads": 1},
    "large": {**LINEAR, **MAMBA, "key_dim": MAX_KEY_DIM, "value_dim": 8, "heads": 1, "key_heads": 1},
    "large_delta": {**LINEAR, "key_dim": 132, "value_dim": 9, "heads": 1, "key_heads": 1},
    "large_by_dim": {**LINEAR, "by_dim": 1, "key_dim": 131, "value_dim": 8, "heads": 1, "key_heads": 1},
}


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Given = tuple[StepBatch, list[Input]]  # of a step


def _inputs(op: str, attrs: Mapping[str, Attr], tokens: int, seed: int) -> list[Input]:
    """Activations of so many tokens, whose numbers depend on the seed, and weights, whose numbers do not."""
    if op == "causal_conv":
        channels, width = int(attrs["channels"]), int(attrs["width"])
        weight, bias = _normal(1, width * channels), _normal(2, channels)
        return [_normal(seed, tokens, channels), Packed(values=weight), Packed(values=bias) if width != 3 else None]
    heads, key_dim = int(attrs["heads"]), int(attrs["key_dim"])
    cols = 2 * int(attrs["key_heads"]) * key_dim + heads * int(attrs["value_dim"])
    x = _normal(seed, tokens, cols) / np.float32(1 if attrs["l2_eps"] else key_dim**0.5)
    dt = 2 * _normal(seed + 1, tokens, heads * (key_dim if attrs["by_dim"] else 1))
    mamba = bool(attrs["values_first"])
    beta = None if mamba else _normal(seed + 2, tokens, heads)
    return [x, dt, beta, Packed(values=_normal(3, heads)), Packed(values=_normal(4, heads)) if mamba else None]


def _run(driver: ctypes.CDLL, op: str, attrs: dict[str, Attr], steps: Sequence[Given]) -> list[tuple[Array, Array]]:
    """(output, slots) behind each of several steps of one session; threads run in both orders."""
    batch, inputs = max(steps, key=lambda given: len(given[0].ids))
    positions = max(int((each.past_lengths + np.diff(each.query_starts)).max()) for each, _ in steps)
    group = state_group(op, attrs)
    plan, section = one_step_plan(f"{op}.f32.sm80", inputs, attrs, batch, group)
    most = max(len(each.past_lengths) for each, _ in steps)
    limits = dataclasses.replace(plan.limits, max_batch_size=most, max_seq_len=positions + 1, max_input_len=positions)
    plan = dataclasses.replace(plan, limits=limits, max_positions=positions)
    found: list[list[tuple[Array, Array]]] = []
    for backwards in one_step.ORDERS:
        driver.emulated_run_backwards(backwards)
        found.append([])
        with contextlib.closing(open_gpu(plan, section, SLOTS)) as session:
            slots = np.full((SLOTS, group.state_offsets[-1]), np.nan, np.float32)
            session.device.upload(session.addresses.kv[0], slots)
            places = {buffer.name: session.addresses.arena + buffer.offset for buffer in plan.buffers}
            for each, given in steps:
                for index, value in enumerate(given):
                    if value is not None and not isinstance(value, Packed):
                        session.device.upload(places[f"in{index}"], np.ascontiguousarray(value))
                _, outputs = session.run_tapped(each, ["step"])
                slots = np.empty_like(slots)
                session.device.fetch(slots, session.addresses.kv[0])
                session.device.wait()
                found[-1].append((outputs["step"]["out0"], slots))
    for one, other in zip(found[0], found[-1], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    return found[0]


def check(driver: ctypes.CDLL, op: str, attrs: dict[str, Attr], steps: int = len(STEPS)) -> None:
    """Values, and every slot, also those that nobody writes."""
    batches = [batch_of(lengths, tables) for lengths, tables in STEPS[:steps]]
    given = [(batch, _inputs(op, attrs, len(batch.ids), 10 + index)) for index, batch in enumerate(batches)]
    cache, spec = StateCache(state_group(op, attrs), SLOTS), find_op(op)
    for (batch, inputs), (output, slots) in zip(given, _run(driver, op, attrs, given), strict=True):
        values = [each.rounded if isinstance(each, Packed) else each for each in inputs]
        call = Call(inputs=with_arrays(spec, values, batch), attrs=attrs, batch=batch, kv=[cache])
        (expected,) = spec.reference(call)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(output, expected, rtol=0, atol=scale * TOLERANCE)
        numbers = cache.numbers[:, : cache.group.state[0]]
        scale = max(1.0, float(np.nanmax(np.abs(numbers))))
        np.testing.assert_allclose(slots[:, : numbers.shape[1]], numbers, rtol=0, atol=scale * TOLERANCE)


@pytest.mark.parametrize("attrs", CONVOLUTIONS, ids=lambda attrs: str(attrs["channels"]))
def test_convolutions(gpu: ctypes.CDLL, attrs: dict[str, Attr]) -> None:
    check(gpu, "causal_conv", attrs)


@pytest.mark.parametrize("name", LINEARS)
def test_linear_attention(gpu: ctypes.CDLL, name: str) -> None:
    check(gpu, "linear_attention", LINEARS[name])


def kernels_of(name: str) -> set[str]:
    """Of steps of single tokens, and of others."""
    attrs, dims = LINEARS[name], 256 if name.startswith("large") else 128
    prompts = "mamba" if attrs["values_first"] else "kda" if attrs["by_dim"] else "delta"
    return {f"linear_attention_{dims}", f"{prompts}_prompts_{dims}"}


SMALL = {**LINEAR, "heads": 2, "value_dim": 12}


@pytest.mark.parametrize(("op", "attrs"), [("causal_conv", CONVOLUTIONS[0]), ("linear_attention", SMALL)])
def test_a_sequence_has_the_same_bits_alone_and_in_chunks(gpu: ctypes.CDLL, op: str, attrs: dict[str, Attr]) -> None:
    check_bits(gpu, op, attrs)


def check_bits(driver: ctypes.CDLL, op: str, attrs: dict[str, Attr]) -> None:
    """37 tokens at once, in chunks, in place; and behind another sequence of two tokens a step."""
    tokens, others = 37, 2
    inputs = _inputs(op, attrs, others + tokens, 77)

    def rows(begin: int, count: int, *, crowded: bool) -> list[Input]:
        def of(each: Input) -> Input:
            if each is None or isinstance(each, Packed):
                return each
            mine = each[others + begin : others + begin + count]
            return np.concatenate([each[:others], mine]) if crowded else mine

        return [of(each) for each in inputs]

    def run(chunks: Sequence[int], table: Sequence[int], *, crowded: bool = False) -> Array:
        steps: list[Given] = []
        past = 0
        for number, count in enumerate(chunks):
            lengths, tables = [(others * number, others), (past, count)], [[8], table]
            batch = batch_of(lengths, tables) if crowded else batch_of(lengths[1:], tables[1:])
            steps.append((batch, rows(past, count, crowded=crowded)))
            past += count
        found = _run(driver, op, attrs, steps)
        return np.concatenate([output[others if crowded else 0 :] for output, _ in found])

    expected = run([37], [3, -1, 1])
    for chunks, table in (([1, 15, 1, 20], [3, 2, 1]), ([20, 17], [0, 0, 4]), ([15, 3, 19], [0, 0, 0])):
        np.testing.assert_array_equal(run(chunks, table), expected)
    np.testing.assert_array_equal(run([30, 7], [3, 2, 1], crowded=True), expected)


NORMS = [  # columns, groups, whether each column of a row has a weight
    *((24, 3, 0), (20, 2, 1), (15, 3, 1), (128, 1, 0), (4100, 1, 0))
]


def check_norms(driver: ctypes.CDLL) -> None:
    """Before and after the gate, with both activations."""
    for number, (columns, groups, own) in enumerate(NORMS):
        x, gate = _normal(1, 3, columns * groups), 3 * _normal(2, 3, columns * groups)
        weight = Packed(values=_normal(3, columns * groups if own else columns))
        attrs: dict[str, Attr] = {
            **{"eps": 1e-6, "columns": columns, "norm_first": number % 2},
            "activation": ("silu", "sigmoid")[number // 2 % 2],
        }
        (expected,) = reference_outputs("gated_norm.f32.sm80", [x, gate, weight], attrs, plain_batch(3))
        (found,) = run_step(driver, "gated_norm.f32.sm80", [x, gate, weight], attrs, plain_batch(3))
        np.testing.assert_allclose(found, expected, rtol=0, atol=np.abs(expected).max() * TOLERANCE)


def test_gated_norms(gpu: ctypes.CDLL) -> None:
    check_norms(gpu)


def test_keys_that_are_too_long_are_refused(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """By a build, before any work, and by a session of a plan that was made elsewhere."""
    long = MAX_KEY_DIM + 4
    inputs = _inputs("linear_attention", attrs := {**LINEARS["large"], "key_dim": long}, 1, 0)
    plan, section = one_step_plan(
        "linear_attention.f32.sm80", inputs, attrs, plain_batch(1), state_group("linear_attention", attrs)
    )
    with pytest.raises(EngineError, match=r"keys of this size(.|\n)*at most 256 numbers(.|\n)*got: 260"):
        open_gpu(plan, section, 1)
    config = {**find_family("granitemoehybrid").tiny, "mamba_d_state": long}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    with pytest.raises(BuildError, match=r"a key of linear attention are beyond(.|\n)*at most 256(.|\n)*got: 260"):
        build(BuildConfig(target="cuda/sm90", dry_run=True), tmp_path / "c", tmp_path / "e")
