"""FP8 weights that are widened by tables of bytes, where the CPU has AVX512_VBMI: the same bits as without."""

import numpy as np
import pytest

from ingot import _cpu
from ingot.plan import Attr
from tests.plugins.cpu.one_step import Quantised, activations_of, native_outputs, open_step, plain_batch, runnable_isa
from tests.plugins.ops.calls import random_f8

pytestmark = pytest.mark.native

ROWS = (1, 2, 3, 4, 5, 9, 40)


@pytest.mark.parametrize("kernel", [f"matmul.f8.{level}" for level in ("avx512", "avx512bf16", "amx")])
@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize("k", [3, 64, 301, 1030])
def test_tables_give_the_same_bits(kernel: str, k: int, group: int) -> None:
    """Whole lines of four columns and what is left of them; one panel, several, and a ragged one."""
    runnable_isa(kernel)
    if not (preferred := _cpu.set_permutes_bytes(False)):
        pytest.skip("this machine lacks AVX512_VBMI")
    x = np.random.default_rng(k).standard_normal((max(ROWS), k)).astype(np.float32)
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": activations_of(kernel), "group": group}
    made: dict[bool, list[bytes]] = {False: [], True: []}
    try:
        for n in (5, 16, 100):
            session = open_step(
                kernel, [x, Quantised.of(random_f8((n, k), group)), None, None], attrs, plain_batch(max(ROWS))
            )
            for tables, found in made.items():
                _cpu.set_permutes_bytes(tables)
                found.extend(native_outputs(session, plain_batch(rows))[0].tobytes() for rows in ROWS)
    finally:
        _cpu.set_permutes_bytes(preferred)
    assert made[False] == made[True]
