"""Engines with an error in their bytes: sections and plans are edited, all checksums are those of the edited."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.compare.packed import PackedWeights, cut
from ingot.engine import open_engine, read_manifest
from ingot.engine_writer import RankFile, write_engine
from ingot.plan import Plan, Step, Weight

Bytes = npt.NDArray[np.uint8]
Edit = Callable[[Plan, Bytes], Plan | None]
"""Changes the weights section in place, or returns another plan."""


def replant(engine: Path, folder: Path, edit: Edit, rank: int = 0) -> Path:
    """A copy of an engine with `edit` applied to one rank, as sound as the first by every checksum."""
    manifest = read_manifest(engine)
    contents = []
    for number in range(manifest.ranks):
        with open_engine(engine, number) as opened:
            section, plan = opened.weights.copy(), opened.plan
        changed = (edit(plan, section) if number == rank else None) or plan
        blocks = [(0, memoryview(section.tobytes()))]
        contents.append(RankFile(plans={manifest.target: changed}, blocks=blocks, rank=number))
    files = [engine / part.name for part in manifest.parts if not part.name.endswith(".engine")]
    folder.mkdir()
    write_engine(folder, dataclasses.replace(manifest, parts=()), contents, files, engine)
    return folder


def panel(plan: Plan, section: Bytes, name: str, column: int, expert: int = 0) -> Bytes:
    """The bytes of the 16 output columns, among them `column`, of a product's weight that is not gated."""
    weight = _weight(plan, name)
    begin = column // 16 * 16
    part = cut(weight, begin, min(begin + 16, weight.shape[-2]), expert)
    return section[part.pieces[0].offset : part.pieces[0].offset + part.nbytes]


def swap_panels(plan: Plan, section: Bytes, name: str, first: int, second: int) -> None:
    """Exchange two groups of 16 columns."""
    one, other = panel(plan, section, name, first), panel(plan, section, name, second)
    one[:], other[:] = other.copy(), one.copy()


def floats(plan: Plan, section: Bytes, name: str) -> npt.NDArray[np.float32]:
    """A float32 vector or table of layout "row", to be written."""
    weight = _weight(plan, name)
    assert weight.layout == "row"
    begin = weight.pieces[0].offset
    return section[begin : begin + weight.nbytes].view(np.float32).reshape(weight.shape)


def with_attr(plan: Plan, step: str, **attrs: int | float | str) -> Plan:
    """The plan with other attributes of one step."""
    steps = tuple(
        dataclasses.replace(each, attrs={**each.attrs, **attrs}) if each.name == step else each for each in plan.steps
    )
    return dataclasses.replace(plan, steps=steps)


def step_named(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def unpacked(plan: Plan, section: Bytes, name: str) -> npt.NDArray[np.float32]:
    """A whole weight that is not quantised."""
    return PackedWeights(plan, section).whole(name)


def _weight(plan: Plan, name: str) -> Weight:
    return next(weight for weight in plan.weights if weight.name == name)
