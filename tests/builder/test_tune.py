"""Autotuning: what is timed, chosen, remembered and refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import ingot.builder.tune as tuning
from ingot.builder.tune import tune
from ingot.dtypes import DType
from ingot.errors import UsageError
from ingot.plan import Attr, Plan
from ingot.plugins.cpu.target import TARGETS
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.target import EnginePart, Product, Tunable
from tests.plugins.cpu.one_step import Input, Packed, Quantised, one_step_plan, plain_batch
from tests.plugins.ops.calls import random_rows

(CPU,) = (each for each in TARGETS if each.name == "cpu/amx" and isinstance(each, Tunable))


class Stopwatch(RefTarget):
    """Claims that the second way is faster for more than `slow_rows` rows."""

    def __init__(self, slow_rows: int = 8, gain: float = 0.5, processor: str = "A", unit: float = 0.001) -> None:
        self.slow_rows, self.gain, self.processor, self.unit = slow_rows, gain, processor, unit
        self.timed: list[tuple[int, int, int]] = []  # (n, rows, tactic)

    def machine(self) -> str:
        return self.processor

    def tactics(self, product: Product, rows: int) -> tuple[str, ...]:
        assert isinstance(CPU, Tunable)
        return CPU.tactics(product, rows)

    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        self.timed.append((product.n, rows, tactic))
        return self.unit * (self.gain if tactic and rows > self.slow_rows else 1.0)


class Absent(Stopwatch):
    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        return "cpu/amx needs AMX"


class Busy(Stopwatch):
    """Something else takes the machine for a while, and the shipped way suffers from it most."""

    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        time = super().time_product(product, rows, tactic)
        return time if len(self.timed) > 8 else time * (5.0 - 2.0 * tactic)


class Preference(Stopwatch):
    """Claims that one tactic is the fastest; notes what it was asked to time."""

    def __init__(self, tactic: int) -> None:
        super().__init__()
        self.tactic, self.products = tactic, set[Product]()

    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        self.products.add(product)
        return super().time_product(product, rows, 0) * (0.5 if tactic == self.tactic else 1.0)


def _plan(tokens: int = 600, n: int = 20, k: int = 70, kernel: str = "matmul.w4a8.avx2") -> Plan:
    inputs: list[Input] = [np.zeros((tokens, k), np.float32), Quantised.of(random_rows(n, k, 32)), None, None]
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "int8", "group": 32}
    return one_step_plan(kernel, inputs, attrs, plain_batch(tokens))[0]


@pytest.fixture(autouse=True)
def tiny_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MIN_WEIGHTS", 1000)


def test_every_class_of_rows_is_timed_both_ways_and_the_faster_is_taken() -> None:
    target = Stopwatch()
    result = tune(_plan(), target, None)
    one_round = [(20, rows, tactic) for rows in (1, 8, 32, 512) for tactic in (0, 1)]
    assert target.timed == one_round * tuning.ROUNDS
    assert result.tactics == {"step": "0011"}
    assert result.table[0] == ("matmul.w4a8.avx2 20 x 70 g32, 1 row: panel by panel 1.000 ms (chosen), blocks 1.000 ms")
    assert result.table[2].endswith("32 rows: as shipped 1.000 ms, other blocks 0.500 ms (chosen)")
    assert result.notes == ()


def test_many_rows_on_tiles_have_more_ways() -> None:
    target = Preference(3)
    result = tune(_plan(kernel="matmul.w4a8.amx"), target, None)
    assert result.tactics == {"step": "0003"}
    assert [line.count(" ms") for line in result.table] == [2, 2, 2, 5]
    assert result.table[3].endswith("parts of K 1.000 ms, epilogue apart 0.500 ms (chosen), half parts 1.000 ms")


def test_long_products_are_timed_less_often() -> None:
    target = Stopwatch(unit=0.1)
    tune(_plan(), target, None)
    assert len(target.timed) == 4 * 2 * 2


def test_what_slows_a_part_of_the_rounds_decides_nothing() -> None:
    assert tune(_plan(), Busy(slow_rows=1000), None).tactics == {"step": "0000"}
    assert tune(_plan(), Busy(unit=0.1), None).tactics == {"step": "0011"}


def test_a_small_gain_is_noise() -> None:
    assert tune(_plan(), Stopwatch(gain=0.97), None).tactics == {"step": "0000"}


def test_rows_beyond_the_limits_are_not_timed() -> None:
    target = Stopwatch()
    assert tune(_plan(tokens=20), target, None).tactics == {"step": "0010"}
    assert {rows for _, rows, _ in target.timed} == {1, 8, 20}


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (1, [1]),
        (2, [1, 2]),
        (8, [1, 8]),
        (9, [1, 8, 9]),
        (32, [1, 8, 32]),
        (33, [1, 8, 32, 33]),
        (512, [1, 8, 32, 512]),
        (9999, [1, 8, 32, 512]),
    ],
)
def test_a_class_of_rows_is_timed_where_a_step_may_have_its_first(most: int, rows: list[int]) -> None:
    assert list(tuning._row_counts(most)) == rows


@pytest.mark.parametrize(("times", "best"), [((1.0, 0.949), 1), ((1.0, 0.951), 0), ((1.0, 0.9, 0.8), 2), ((1.0,), 0)])
def test_another_way_must_gain_a_twentieth(times: tuple[float, ...], best: int) -> None:
    assert tuning._best(times) == best


def test_tiny_products_are_left_alone() -> None:
    target = Stopwatch()
    result = tune(_plan(n=2), target, None)
    assert (result.tactics, result.table, target.timed) == ({}, (), [])


def test_only_some_columns_of_a_large_product_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_BYTES", 3000)
    target = Stopwatch()
    tune(_plan(n=100), target, None)
    assert {n for n, _, _ in target.timed} == {32}


def test_other_machines_and_targets_take_the_shipped_way() -> None:
    assert tune(_plan(), Absent(), None).notes == (
        "nothing is timed for ref: cpu/amx needs AMX. To measure it, run `ingot bench kernels` "
        "on a machine that has it",
    )
    assert tune(_plan(), RefTarget(), None).notes == ()
    assert tune(_plan(), RefTarget(), Path("f")).notes == (
        "nothing is timed for ref: its kernels have one tactic each",
    )


def test_the_cache_saves_the_timing(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    first, again = Stopwatch(), Stopwatch(slow_rows=1000)
    assert tune(_plan(), first, cache).tactics == tune(_plan(), again, cache).tactics == {"step": "0011"}
    assert again.timed == []
    tune(_plan(n=40), again, cache)
    assert {n for n, _, _ in again.timed} == {40}


def test_each_machine_has_its_own_times(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    tune(_plan(), Stopwatch(), cache)
    other = Stopwatch(slow_rows=1000, processor="B")
    result = tune(_plan(), other, cache)
    assert result.tactics == {"step": "0000"}
    assert result.notes == ("the timing cache holds nothing of this machine, only of: A",)
    assert set(json.loads(cache.read_text())["machines"]) == {"A", "B"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"timing_cache": 2, "machines": {}}',
        '{"timing_cache": 1, "machines": {"A": {"p": [0.0, 1.0]}}}',
        '{"timing_cache": 1, "machines": {"A": {"p": ["x"]}}}',
        '{"timing_cache": 1, "machines": {"A": {"p": 3}}}',
    ],
)
def test_what_is_no_cache_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text(text)
    with pytest.raises(UsageError, match="not a timing cache of this version"):
        tune(_plan(), Stopwatch(), cache)
    assert cache.read_text() == text


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        tune(_plan(), Stopwatch(), tmp_path / "nowhere" / "cache.json")


def _experts_plan(op: str, experts: int = 6, slots: int = 2, n: int = 40, k: int = 33, tokens: int = 600) -> Plan:
    gated = op == "moe_gate_up"
    weight = Packed(values=np.zeros((experts, n, k), np.float32), dtype=DType.BF16, panels=True, gated=gated)
    ids = np.zeros((tokens, slots), np.float32)
    attrs: dict[str, Attr] = {"activations": "f32", "group": 0}
    if gated:
        inputs: list[Input] = [np.zeros((tokens, k), np.float32), ids, weight, None]
        attrs |= {"activation": "silu", "limit": 0.0, "alpha": 1.0, "gated": 1}
    else:
        inputs = [np.zeros((tokens, slots * k), np.float32), ids, ids, weight, None]
    return one_step_plan(f"{op}.bf16.avx2", inputs, attrs, plain_batch(tokens))[0]


@pytest.mark.parametrize("tactic", [0, 1, 2])
def test_experts_are_timed_in_all_their_ways(tactic: int) -> None:
    target = Preference(tactic)
    result = tune(_experts_plan("moe_gate_up"), target, None)
    assert target.timed == [(40, rows, 0) for rows in (1, 8, 32, 512) for _ in range(3)] * tuning.ROUNDS
    (product,) = target.products
    assert (product.experts, product.slots, product.k, product.gated) == (6, 2, 33, True)
    assert result.tactics == {"step": f"{tactic}" * 4}
    head = "moe_gate_up.bf16.avx2 40 x 33 gated, 2 of 6 experts, "
    assert [line.partition(": ")[0] for line in result.table] == [
        head + rows for rows in ("1 row", "8 rows", "32 rows", "512 rows")
    ]
    assert all(line.count(" ms") == 3 for line in result.table)
    names = [part.rpartition(" ")[0] for part in result.table[0].partition("row: ")[2].split(" ms")]
    assert names[0] == "own panels"
    assert [line.count("whole experts in turn 0.500 ms (chosen)") for line in result.table] == [int(tactic == 2)] * 4


def test_experts_of_the_other_half_have_two_ways() -> None:
    target = Preference(1)
    result = tune(_experts_plan("moe_down", tokens=20), target, None)
    assert result.tactics == {"step": "1110"}
    assert result.table[0] == (
        "moe_down.bf16.avx2 40 x 33, 2 of 6 experts, 1 row: own panels 1.000 ms, blocks in turn 0.500 ms (chosen)"
    )
    assert result.table[2].endswith("20 rows: as shipped 1.000 ms, otherwise shared 0.500 ms (chosen)")


def test_the_cache_tells_experts_apart(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    tune(_experts_plan("moe_gate_up"), Preference(2), cache)
    again = Preference(0)
    assert tune(_experts_plan("moe_gate_up"), again, cache).tactics == {"step": "2222"}
    assert again.timed == []
    assert (
        "moe_gate_up.bf16.avx2 40 x 33 gated, 2 of 6 experts rows 32" in json.loads(cache.read_text())["machines"]["A"]
    )
    for other in (_experts_plan("moe_gate_up", experts=7), _experts_plan("moe_gate_up", slots=3)):
        target = Preference(0)
        assert tune(other, target, cache).tactics == {"step": "0000"}
        assert len(target.timed) == 4 * tuning.ROUNDS * 3


def test_experts_are_small_by_what_a_row_takes_of_them() -> None:
    """Of 990 weights each: one is left alone, two are timed."""
    one, two = Preference(1), Preference(1)
    assert tune(_experts_plan("moe_down", slots=1, n=30), one, None).tactics == {}
    assert tune(_experts_plan("moe_down", slots=2, n=30), two, None).tactics == {"step": "1111"}


def test_only_some_of_large_experts_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of 2 KiB: first fewer columns, then fewer experts, never fewer than a row takes."""
    sizes = {}
    for limit in (1 << 20, 120 << 10, 40 << 10, 1):
        monkeypatch.setattr(tuning, "MAX_EXPERT_BYTES", limit)
        target = Preference(0)
        tune(_experts_plan("moe_gate_up", n=400), target, None)
        (product,) = target.products
        sizes[limit] = (product.experts, product.n)
    assert sizes == {1 << 20: (6, 400), 120 << 10: (6, 160), 40 << 10: (2, 160), 1: (2, 128)}
