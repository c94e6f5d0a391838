"""Engines whose parts are sound and do not belong together, and a system that reads less than it is asked for."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import EngineError
from ingot.plan import Buffer, Rows
from ingot.plan_check import check_plan
from ingot.weights_memory import NumaPlacement
from tests.hall.resealed import edit_manifest, edit_plans, in_manifest, in_plan, seal_part
from tests.hall.test_engine import engine, make_plan, pristine  # noqa: F401
from tests.hall.test_weights_memory import ANYWHERE, write


def test_a_plan_with_fewer_weights_than_the_file(engine: Path) -> None:  # noqa: F811
    edit_plans(engine, in_plan(lambda plan: plan.update(weight_bytes=plan["weight_bytes"] - 4)))
    with pytest.raises(EngineError, match="contradict each other"):
        open_engine(engine)


def test_a_rank_file_of_an_engine_with_more_ranks(engine: Path) -> None:  # noqa: F811
    file = engine / "rank0.engine"
    data = bytearray(file.read_bytes())
    assert data[20:24] == (1).to_bytes(4, "little")
    data[20:24] = (2).to_bytes(4, "little")
    file.write_bytes(data)
    seal_part(engine, file.name)
    with pytest.raises(EngineError, match=r"header of the engine file is damaged(.|\n)*ranks=2"):
        open_engine(engine)


def test_a_rank_file_that_no_target_needs(engine: Path) -> None:  # noqa: F811
    shutil.copy(engine / "rank0.engine", engine / "rank1.engine")

    def add(manifest: dict[str, Any]) -> None:
        rank = next(each for each in manifest["parts"] if each["name"] == "rank0.engine")
        manifest["parts"] = sorted([*manifest["parts"], rank | {"name": "rank1.engine"}], key=lambda each: each["name"])

    edit_manifest(engine, in_manifest(add))
    with pytest.raises(EngineError, match=r"rank files rank0.engine, rank1.engine; its targets need rank0.engine"):
        open_engine(engine)


@pytest.mark.parametrize(("offset", "sound"), [(128, True), (0, False), (64, False)])
def test_a_buffer_is_not_read_once_another_was_written_over_it(offset: int, sound: bool) -> None:
    """x takes the first 128 bytes of the arena."""
    plan = make_plan()
    rows = plan.limits.max_logit_rows
    buffers = tuple(
        Buffer(name=name, rows=Rows.LOGITS, cols=cols, offset=at)
        for name, cols, at in (("x", -(-128 // (4 * rows)), 0), ("y", 1, offset), ("b", 5, 256))
    )
    ways = (("w", "x"), ("w", "y"), ("x", "b"))
    steps = tuple(
        dataclasses.replace(plan.steps[0], name=f"{i}", inputs=(read, "", "input_ids", ""), outputs=(write,))
        for i, (read, write) in enumerate(ways)
    )
    arena = 256 + -(-rows * 5 * 4 // 64) * 64
    made = dataclasses.replace(plan, buffers=buffers, steps=steps, arena_bytes=arena)
    if sound:
        check_plan(made)
        return
    with pytest.raises(EngineError, match="reads x, which no earlier kernel call has written"):
        check_plan(made)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (DType.I64, r"buffers.b.dtype(.|\n)*i64, expected f32, bf16, f16, f8, i32"),
        *((dtype, "columns of f32") for dtype in (DType.BF16, DType.I32)),
    ],
)
def test_logits_are_float32_and_buffers_hold_few_types(dtype: DType, words: str) -> None:
    plan = make_plan()
    nbytes = plan.limits.max_logit_rows * 5 * dtype.itemsize
    buffers = (dataclasses.replace(plan.buffers[0], dtype=dtype),)
    with pytest.raises(EngineError, match=words):
        check_plan(dataclasses.replace(plan, buffers=buffers, arena_bytes=-(-nbytes // 64) * 64))


def test_reads_that_bring_less_than_asked_for_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, 5 << 20)
    with open_engine(directory) as mapped:
        expected = mapped.weights.copy()
    read = os.preadv
    counts: list[int] = []

    def some(file: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(read(file, [buffers[0][: 1 << 20]], offset))
        return counts[-1]

    monkeypatch.setattr("ingot.engine.os.preadv", some)

    def placement(plan: object) -> NumaPlacement:
        return ANYWHERE

    with open_engine(directory, placement=placement) as copied:
        np.testing.assert_array_equal(copied.weights, expected)
    assert len(counts) > 2
