"""Sizes, addresses and keys that the host chooses for a GPU, without one."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import CacheGroup, Split
from ingot.plugins.cuda import compiler, products
from ingot.plugins.cuda.decode_graphs import DecodeGraphs
from ingot.plugins.cuda.gpu import Gpu
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.cuda.products import Product, Products
from ingot.plugins.cuda.shapes import Tiles, partial_rows, partial_sums, prefill_parts, prefill_tokens, product_rows
from ingot.plugins.cuda.step_tables import StepTables
from ingot.plugins.cuda.target import TARGETS, CudaTarget
from ingot.plugins.cuda.work import Addresses, cache_places
from tests.plugins.cpu.one_step import batch_of, one_step_plan, plain_batch


def test_few_products_need_a_plan() -> None:
    assert [product_rows(rows, 4096) for rows in (1, 3, 8, 9, 17, 65, 1000)] == [1, 4, 8, 16, 24, 72, 1024]
    for most in (1, 5, 100, 4095):
        for rows in {1, most // 2 + 1, most}:
            assert rows <= product_rows(rows, most) <= most


def test_more_parts_of_a_context_than_a_kernel_combines_are_refused() -> None:
    plan, _ = one_step_plan("add.f32.sm80", [np.zeros((1, 8), np.float32)] * 2, {}, plain_batch(1))
    for parts in (64, 65):
        plan = dataclasses.replace(plan, splits=(Split(most_items=1, parts=parts, least_tokens=64),))
        refused = pytest.raises(EngineError, match="at most 64 parts") if parts > 64 else contextlib.nullcontext()
        with refused:
            specialisation(plan)


def test_a_decode_step_is_filled_up_to_the_next_size_of_the_plan() -> None:
    plan, _ = one_step_plan("add.f32.sm80", [np.zeros((1, 8), np.float32)] * 2, {}, plain_batch(1))
    device: Any = None  # captures graphs, and none is captured here
    graphs = DecodeGraphs(device, dataclasses.replace(plan, decode_sizes=(1, 2, 5, 6)))

    def size(new: Sequence[int], rows: int) -> int | None:
        return graphs.size(batch_of([(3, each) for each in new], [[0]] * len(new), range(rows)))

    assert [size([1] * count, count) for count in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 5, 5, 5, 6, None]
    assert size([1, 2], 2) is None, "a prompt takes part"
    assert size([1, 1], 1) is None, "not all logits are wanted"


def test_tiles_hold_as_many_tokens_as_their_rows_allow() -> None:
    def tokens(head_dim: int) -> list[int]:
        return [prefill_tokens(group, head_dim) for group in (1, 3, 16, 64)]

    assert tokens(64) == tokens(128) == [128, 42, 8, 2]
    assert tokens(136) == tokens(256) == [64, 21, 4, 1]
    assert tokens(260) == tokens(512) == [32, 10, 2, 1]


def test_an_item_of_prefill_has_tiles_for_all_its_rows() -> None:
    """Heads that hold fewer tokens in a tile than others of the model make parts of an item."""
    assert [prefill_parts(64, group, 64) for group in (1, 2, 3, 16)] == [1, 1, 2, 8]
    assert [prefill_parts(32, group, 512) for group in (1, 2, 3, 8, 64)] == [1, 2, 3, 8, 64]
    assert prefill_parts(1, 64, 512) == 2, "a token's rows fill two tiles"


def test_sums_of_parts_have_room_in_every_layer() -> None:
    """Rows and numbers of a row are largest in different layers."""
    plan, _ = one_step_plan("add.f32.sm80", [np.zeros((1, 8), np.float32)] * 2, {}, plain_batch(1))
    groups = tuple(
        CacheGroup(layers=(layer,), kv_heads=heads, head_dim=dim, tokens_per_block=16, dtype=DType.BF16)
        for layer, heads, dim in ((0, 16, 256), (1, 4, 512))
    )
    plan = dataclasses.replace(plan, caches=groups, splits=(Split(most_items=3, parts=5, least_tokens=64),))
    assert partial_rows(plan) == 16 * 16 * 3 * 5
    assert partial_sums(plan) == 16 * 16 * 256 * 3 * 5
    fewer = dataclasses.replace(plan, caches=(dataclasses.replace(groups[0], kv_heads=6), groups[1]))
    assert partial_sums(fewer) == 16 * 4 * 512 * 3 * 5


def test_shared_memory_belongs_to_kernels() -> None:
    """On the emulated GPU it is static: in an inline function, a library that has it would stay loaded for ever."""
    for path in compiler.SOURCES.glob("*.cu*"):
        last = ""
        for line in path.read_text().splitlines():
            last = next(iter(re.findall(r"\bINGOT_(?:KERNEL|DEVICE)", line)), last)
            assert "__shared__" not in line or line.startswith("#define") or last == "INGOT_KERNEL", f"{path}: {line}"


def test_prompts_that_see_most_are_attended_to_first() -> None:
    """What runs last is short then."""
    tables: Any = SimpleNamespace(_tiles=Tiles(decode=4, prefill=32))
    batch = batch_of([(0, 40), (9, 1), (100, 70)], [[0], [1], [2]], [], ids=np.zeros(111, np.int32))
    decode, prefill = StepTables._items(tables, batch, np.diff(batch.query_starts))
    assert decode.tolist() == [[1, 40, 1, 9]]
    expected = [[2, 105, 6, 164], [2, 73, 32, 132], [2, 41, 32, 100], [0, 32, 8, 32], [0, 0, 32, 0]]
    assert prefill.tolist() == expected


def test_keys_and_values_of_layers_follow_one_another() -> None:
    kv = CacheGroup(layers=(0, 1), kv_heads=2, head_dim=20, tokens_per_block=16, dtype=DType.BF16)
    nowhere: dict[str, Any] = dict.fromkeys(
        (*("weights", "arena", "sums", "exchanged", "place"), *("drawn", "partial", "stats", "table_width")), 0
    )
    at = Addresses(**nowhere, kv=(1000,), num_blocks=(3,), tables={})
    first, second = (cache_places((kv,), at, layer)[1:] for layer in (0, 1))
    assert first == (1000, 1000 + 3 * kv.k_block_bytes)
    assert second[0] == first[1] + 3 * kv.v_block_bytes
    assert second[1] - second[0] == 3 * kv.k_block_bytes


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((8, 0), {"sm80"}),
        ((8, 6), {"sm80", "sm86"}),
        ((8, 7), {"sm80", "sm86"}),
        ((8, 9), {"sm80", "sm86", "sm89"}),
        ((9, 0), {"sm90"}),
        ((10, 3), {"sm100"}),
        ((12, 1), {"sm120"}),
        ((7, 5), set()),
        ((11, 0), set()),
    ],
)
def test_which_gpus_run_which_code(capability: tuple[int, int], names: set[str]) -> None:
    gpu = Gpu(index=0, name="g", capability=capability, memory_bytes=1, multiprocessors=1)
    targets = [target for target in TARGETS if isinstance(target, CudaTarget)]
    assert {each.name.removeprefix("cuda/") for each in targets if each.architecture.runs_on(gpu)} == names


def test_an_algorithm_is_looked_up_once_per_shape_type_and_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for matrices on multiples of 256 bytes may read more at once than those elsewhere allow."""
    monkeypatch.setattr(products, "find_library", lambda: SimpleNamespace())
    monkeypatch.setattr(products.Library, "call", lambda *_: None)
    planned: list[tuple[Any, ...]] = []

    def plan(self: Products, *shape: Any) -> Any:
        planned.append(shape)
        heuristic: Any = products._Heuristic()
        return SimpleNamespace(operation=None, weight=None, x=None, y=None, heuristic=heuristic)

    monkeypatch.setattr(Products, "_plan", plan)
    with contextlib.closing(Products(0, 0)) as made:

        def run(rows: int, *, x: int = 1024, y0: int = 0, n: int = 8, k: int = 4, out: DType = DType.F32) -> None:
            product = Product(x=x, weight=512, y=2048, y0=y0, n=n, k=k, dtype=DType.BF16, out=out)
            made.run(product, rows)

        run(2)
        run(2, x=4096, y0=256)
        assert planned == [(2, 8, 4, DType.BF16, DType.F32, 256)]
        for other in ({"x": 16}, {"y0": 32}, {"n": 4}, {"k": 8}, {"out": DType.BF16}):
            run(2, **other)
            run(2, **other)
        run(3)
    assert len(planned) == len(set(planned)) == 7
    assert [shape[-1] for shape in planned] == [256, 16, 32, 256, 256, 256, 256]
