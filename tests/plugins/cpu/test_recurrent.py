"""Kernels of recurrent layers: against the references, and the same bits in chunks of any length."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import open_native
from ingot.plugins.op import Array
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    hold,
    native_outputs,
    one_step_plan,
    open_step,
    plain_batch,
    reference_outputs,
    runnable_isa,
)
from tests.plugins.ops.calls import make_batch, random_array
from tests.plugins.ops.states import in_chunks, state_group

pytestmark = pytest.mark.native

TOKENS, TABLE = 37, [3, -1, 1]
CONV: dict[str, Attr] = {"layer": 0, "channels": 37, "width": 4, "activation": "silu"}
LINEAR: dict[str, Attr] = {
    "layer": 0,
    "heads": 4,
    "key_heads": 2,
    "key_dim": 24,
    "value_dim": 72,
    "values_first": 0,
    "scale": 0.25,
    "l2_eps": 1e-6,
    "dt_min": 0.0,
    "dt_max": 3.0e38,
}


def _inputs(op: str, steps: int = 4) -> tuple[list[Array], int]:
    """(inputs, of how many there is a row for each token); steps: of linear attention, for each token"""
    if op == "causal_conv":
        return [random_array(TOKENS, 37), random_array(4 * 37, seed=1), random_array(37, seed=2)], 1
    rows = [random_array(TOKENS, n, seed=n) for n in (2 * 2 * 24 + 4 * 72, steps, 4)]
    return [*rows, random_array(4, seed=5), random_array(4, seed=6)], 3


@pytest.mark.parametrize(
    ("kernel", "by_dim"),
    [(n, 0) for n in kernel_table() if n.split(".")[0] in ("causal_conv", "linear_attention")]
    + [(n, 1) for n in kernel_table() if n.split(".")[0] == "linear_attention"],
)
def test_states(kernel: str, by_dim: int) -> None:
    op = kernel.split(".")[0]
    attrs = CONV if op == "causal_conv" else {**LINEAR, "by_dim": by_dim}
    values, rows = _inputs(op, steps=4 * 24 if by_dim else 4)
    expected, _ = in_chunks(op, values, rows, attrs, [TOKENS], TABLE)
    found = []
    for chunks, threads, table in (((37,), 1, TABLE), ((1, 15, 1, 20), 2, [3, 2, 1]), ((20, 17), 2, [0, 0, 4])):
        parts, past, session = [], 0, None
        for count in chunks:
            batch = make_batch([0] * count, [count], [past], [table])
            given: list[Input] = [
                each[past : past + count] if index < rows else Packed(values=each) for index, each in enumerate(values)
            ]
            if session is None:
                full: list[Input] = [each if index < rows else Packed(values=each) for index, each in enumerate(values)]
                largest = make_batch([0] * TOKENS, [TOKENS], [0], [table])
                plan, section = one_step_plan(kernel, full, attrs, largest, state_group(op, attrs))
                options = SessionOptions(num_blocks=(8,), threads=threads)
                session = open_native(plan, section, options, runnable_isa(kernel))
                session.native.fill_kv(float("nan"))
                hold(session, plan.limits.max_batch_size)
            for index, each in enumerate(given):
                if not isinstance(each, Packed) and each is not None:
                    session.native.write_buffer(f"in{index}", np.ascontiguousarray(each))
            parts += native_outputs(session, batch)
            past += count
        assert session is not None
        session.close()
        found.append(np.concatenate(parts))
        np.testing.assert_allclose(found[-1], expected, atol=3e-5)
        np.testing.assert_array_equal(found[-1], found[0])


@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.startswith("gated_norm.")])
@pytest.mark.parametrize("norm_first", [0, 1])
def test_gated_norm(kernel: str, norm_first: int) -> None:
    inputs: list[Input] = [random_array(5, 72), random_array(5, 72, seed=1), Packed(values=random_array(24, seed=2))]
    for activation in ("silu", "sigmoid"):
        attrs: dict[str, Attr] = {"eps": 1e-6, "columns": 24, "norm_first": norm_first, "activation": activation}
        session = open_step(kernel, inputs, attrs, plain_batch(5), threads=2)
        (got,) = native_outputs(session, plain_batch(5))
        session.close()
        (expected,) = reference_outputs(kernel, inputs, attrs, plain_batch(5))
        np.testing.assert_allclose(got, expected, atol=3e-6)
