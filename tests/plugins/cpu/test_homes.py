"""Which memory node each part of the weights belongs to, on machines that are made up."""

import dataclasses

import pytest

from ingot.dtypes import DType
from ingot.errors import UsageError
from ingot.plan import Piece, Plan, Weight
from ingot.plugins.cpu.homes import weight_homes
from ingot.plugins.cpu.native import core_count
from ingot.plugins.registry import find_target
from ingot.plugins.target import WithHomes
from ingot.weights_memory import offers_huge_pages
from tests.hall.test_engine import make_plan

MB = 1 << 20
TABLE = Weight(
    name="t",
    dtype=DType.W8,
    shape=(64, 4),
    layout="row.w8",
    nbytes=64 * MB,
    pieces=(Piece(begin=0, end=64, offset=128 * MB),),
)


def sharded(shards: int) -> Plan:
    """A product of 128 MiB in so many shards, then a table of 64."""
    each = 64 // shards
    pieces = tuple(Piece(begin=i * each, end=(i + 1) * each, offset=2 * MB * i * each) for i in range(shards))
    weight = Weight(name="w", dtype=DType.BF16, shape=(1024, 4), layout="panel16.bf16", nbytes=128 * MB, pieces=pieces)
    return dataclasses.replace(make_plan(), weights=(weight, TABLE))


def nodes(plan: Plan, cores: list[tuple[int, int]], threads: int) -> list[int]:
    """The node of every 4 MiB."""
    homes = weight_homes(plan, cores, threads)
    return [homes.node(offset) for offset in range(0, 192 * MB, 4 * MB)]


SOCKETS = [(cpu, cpu // 8) for cpu in range(16)]


def test_one_node_holds_everything() -> None:
    homes = weight_homes(sharded(2), [(3, 0), (5, 0)], 2)
    assert homes.cores == (frozenset([3, 5]),)
    assert set(nodes(sharded(2), [(3, 0), (5, 0)], 2)) == {0}


@pytest.mark.parametrize("shards", [2, 4, 16])
def test_shards_lie_with_the_threads_that_read_them(shards: int) -> None:
    found = nodes(sharded(shards), SOCKETS, 16)
    assert found[:32] == [0] * 16 + [1] * 16
    assert found[32:] == [0, 1] * 8  # the table, which all read


def test_what_is_not_cut_finely_enough_lies_on_all_nodes_in_turn() -> None:
    assert nodes(sharded(1), SOCKETS, 16) == [0, 1] * 24
    four = [(cpu, cpu // 4) for cpu in range(16)]
    assert nodes(sharded(2), four, 16)[:32] == [0, 1] * 8 + [2, 3] * 8


@pytest.mark.parametrize("threads", [0, 257, 1 << 62])
def test_numbers_of_threads_that_cannot_be(threads: int) -> None:
    target = find_target("cpu")
    assert isinstance(target, WithHomes)
    with pytest.raises(UsageError, match="1 to 256"):
        target.homes(sharded(2), threads)


def test_fewer_threads_than_shards_or_cores() -> None:
    assert nodes(sharded(16), SOCKETS, 2) == [0] * 48  # both threads run on the first socket
    assert weight_homes(sharded(16), SOCKETS, 2).cores == (frozenset(range(8)),)  # all of it read the weights in
    spread = [(0, 0), (8, 1)]
    assert nodes(sharded(16), spread, 2)[:32] == [0] * 16 + [1] * 16


def test_more_threads_than_cores() -> None:
    assert nodes(sharded(4), [(0, 0), (8, 1)], 4)[:32] == [0] * 8 + [1] * 8 + [0] * 8 + [1] * 8


def test_nodes_may_have_any_numbers() -> None:
    homes = weight_homes(sharded(2), [(4, 7), (5, 7), (0, 2), (1, 2)], 4)
    assert homes.cores == (frozenset([4, 5]), frozenset([0, 1]))
    assert [homes.node(0), homes.node(100 * MB)] == [0, 1]


def test_this_machine() -> None:
    target = find_target("cpu")
    assert isinstance(target, WithHomes)
    homes = target.homes(sharded(2), None)
    if offers_huge_pages():
        assert homes is not None
        assert sum(len(cores) for cores in homes.cores) == core_count()
