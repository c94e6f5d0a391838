"""Which memory node each part of the weights belongs to, on machines that are made up."""

import dataclasses

import pytest

from ingot.dtypes import DType
from ingot.errors import UsageError
from ingot.plan import Plan, Weight, WeightSlice
from ingot.plugins.cpu.native import core_count
from ingot.plugins.cpu.numa import numa_placement
from ingot.plugins.registry import find_target
from ingot.plugins.target import NumaAware
from ingot.weights_memory import offers_huge_pages
from tests.hall.test_engine import make_plan

MB = 1 << 20
TABLE = Weight(
    name="t",
    dtype=DType.W8,
    shape=(64, 4),
    layout="row.w8",
    nbytes=64 * MB,
    pieces=(WeightSlice(begin=0, end=64, offset=128 * MB),),
)


def sliced(slices: int) -> Plan:
    """A product of 128 MiB in so many slices, then a table of 64."""
    each = 64 // slices
    pieces = tuple(WeightSlice(begin=i * each, end=(i + 1) * each, offset=2 * MB * i * each) for i in range(slices))
    weight = Weight(name="w", dtype=DType.BF16, shape=(1024, 4), layout="panel16.bf16", nbytes=128 * MB, pieces=pieces)
    return dataclasses.replace(make_plan(), weights=(weight, TABLE))


def nodes(plan: Plan, cores: list[tuple[int, int]], threads: int) -> list[int]:
    """The node of every 4 MiB."""
    placement = numa_placement(plan, cores, threads)
    return [placement.node(offset) for offset in range(0, 192 * MB, 4 * MB)]


SOCKETS = [(cpu, cpu // 8) for cpu in range(16)]


def test_one_node_holds_everything() -> None:
    placement = numa_placement(sliced(2), [(3, 0), (5, 0)], 2)
    assert placement.cores == (frozenset([3, 5]),)
    assert set(nodes(sliced(2), [(3, 0), (5, 0)], 2)) == {0}


@pytest.mark.parametrize("slices", [2, 4, 16])
def test_slices_lie_with_the_threads_that_read_them(slices: int) -> None:
    found = nodes(sliced(slices), SOCKETS, 16)
    assert found[:32] == [0] * 16 + [1] * 16
    assert found[32:] == [0, 1] * 8  # the table, which all read


def test_what_is_not_cut_finely_enough_lies_on_all_nodes_in_turn() -> None:
    assert nodes(sliced(1), SOCKETS, 16) == [0, 1] * 24
    four = [(cpu, cpu // 4) for cpu in range(16)]
    assert nodes(sliced(2), four, 16)[:32] == [0, 1] * 8 + [2, 3] * 8


@pytest.mark.parametrize("threads", [0, 257, 1 << 62])
def test_numbers_of_threads_that_cannot_be(threads: int) -> None:
    target = find_target("cpu")
    assert isinstance(target, NumaAware)
    with pytest.raises(UsageError, match="1 to 256"):
        target.placement(sliced(2), threads)


def test_fewer_threads_than_slices_or_cores() -> None:
    assert nodes(sliced(16), SOCKETS, 2) == [0] * 48  # both threads run on the first socket
    assert numa_placement(sliced(16), SOCKETS, 2).cores == (frozenset(range(8)),)  # all of it read the weights in
    spread = [(0, 0), (8, 1)]
    assert nodes(sliced(16), spread, 2)[:32] == [0] * 16 + [1] * 16


def test_more_threads_than_cores() -> None:
    assert nodes(sliced(4), [(0, 0), (8, 1)], 4)[:32] == [0] * 8 + [1] * 8 + [0] * 8 + [1] * 8


def test_nodes_may_have_any_numbers() -> None:
    placement = numa_placement(sliced(2), [(4, 7), (5, 7), (0, 2), (1, 2)], 4)
    assert placement.cores == (frozenset([4, 5]), frozenset([0, 1]))
    assert [placement.node(0), placement.node(100 * MB)] == [0, 1]


def test_this_machine() -> None:
    target = find_target("cpu")
    assert isinstance(target, NumaAware)
    placement = target.placement(sliced(2), None)
    if offers_huge_pages():
        assert placement is not None
        assert sum(len(cores) for cores in placement.cores) == core_count()
