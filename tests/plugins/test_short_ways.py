"""What packed panels say of their groups: byte 82 of the header."""

import dataclasses

import numpy as np
import pytest

from ingot.plugins.grouped import GroupedRows
from ingot.plugins.layouts import pack_quantised
from ingot.plugins.short_ways import SCALES_OF_FEW_BITS, WHOLE_SHIFTS
from tests.plugins.ops.calls import random_grouped

SHAPE = (40, 200)  # three panels, of which the last one has padding


def said(rows: GroupedRows) -> list[int]:
    packed: list[int] = pack_quantised(rows)[:, 82].tolist()
    return packed


def test_scales_of_few_bits() -> None:
    """Six significant bits, of numbers below the least normal one, too. One scale of a panel's last row is enough."""
    rows = random_grouped(SHAPE, 32)
    scales = np.full_like(rows.group_scale, 0.75)
    assert said(dataclasses.replace(rows, group_scale=scales)) == [SCALES_OF_FEW_BITS] * 3
    for scale, few in ((1.96875, True), (1.984375, False), (2.0**-15, True), (2.0**-24, False), (0.0, True)):
        scales[31, -1] = scale
        assert said(dataclasses.replace(rows, group_scale=scales))[1] == SCALES_OF_FEW_BITS * few, scale


@pytest.mark.parametrize(
    ("zero", "whole"),
    [(0.0, True), (16.0, True), (17.0, False), (-16.0, True), (-17.0, False), (7.5, False), (-0.5, False)],
)
def test_whole_zero_points(zero: float, whole: bool) -> None:
    rows = random_grouped(SHAPE, 64, "zero")
    assert rows.shift is not None
    shift = np.full_like(rows.shift, 8.0)
    shift[16, 0] = zero
    scales = np.full_like(rows.group_scale, 1.984375)  # of seven bits
    found = said(dataclasses.replace(rows, shift=shift, group_scale=scales))
    assert found == [WHOLE_SHIFTS, WHOLE_SHIFTS * whole, WHOLE_SHIFTS]


def test_offsets_are_no_zero_points() -> None:
    rows = random_grouped(SHAPE, 64, "offset")
    assert rows.shift is not None
    scales = np.full_like(rows.group_scale, 1.984375)
    assert said(dataclasses.replace(rows, shift=np.full_like(rows.shift, 8.0), group_scale=scales)) == [0, 0, 0]
