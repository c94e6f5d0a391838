"""Parts of KV blocks that ranks hold: together they are the block of one rank, whatever divides the model."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import STATE_WINDOW, CacheGroup
from ingot.plugins.cpu.rank_blocks import RankBlocks
from ingot.plugins.rank_shares import RankShares

SIZE = 16  # tokens of a block
KINDS = {
    "f32": CacheGroup(layers=tuple(range(5)), kv_heads=6, head_dim=8, tokens_per_block=SIZE, dtype=DType.F32),
    "bf16": CacheGroup(layers=tuple(range(5)), kv_heads=6, head_dim=20, tokens_per_block=SIZE, dtype=DType.BF16),
    "int8": CacheGroup(layers=tuple(range(5)), kv_heads=6, head_dim=8, tokens_per_block=SIZE, dtype=DType.I8),
    "latents": CacheGroup(
        layers=tuple(range(5)), kv_heads=1, head_dim=24, latent=16, tokens_per_block=SIZE, dtype=DType.BF16
    ),
    "states": CacheGroup(
        layers=tuple(range(5)),
        kv_heads=0,
        head_dim=0,
        tokens_per_block=SIZE,
        dtype=DType.F32,
        window=STATE_WINDOW,
        state=(7, 40, 16, 1, 33),
    ),
}
# Heads [first, last and one) of each rank of a stage, and how many neighbours have the same; layers of each stage, the
# first stage first.
HEADS: list[tuple[list[tuple[int, int]], int]] = [
    ([(0, 6)], 1),
    ([(0, 3), (3, 6)], 1),
    ([(0, 2), (2, 3), (3, 5), (5, 6)], 1),
    ([(0, 6)] * 2, 2),
    ([(0, 3)] * 2 + [(3, 6)] * 2, 2),
    ([(0, 3)] * 2 + [(3, 5), (5, 6)], 1),
]
LAYERS = [(5,), (3, 2), (1, 1, 3)]


def parts_of(whole: CacheGroup, heads: Sequence[tuple[int, int]], layers: Sequence[int]) -> list[CacheGroup]:
    """Of each rank: those of the last stage come first."""
    found: list[CacheGroup] = []
    for stage, count in enumerate(layers):
        begin = sum(layers[:stage])
        own = []
        for low, high in heads:
            share = dataclasses.replace(whole, layers=tuple(range(count)), state=whole.state[begin : begin + count])
            if whole.kv_heads > 1:
                share = dataclasses.replace(
                    share, kv_heads=high - low, heads_before=low, heads_behind=whole.kv_heads - high
                )
            own.append(share)
        found = own + found
    return found


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("heads", "alike"), HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_ranks_make_the_block_of_one(
    kind: str, heads: list[tuple[int, int]], alike: int, layers: tuple[int, ...]
) -> None:
    """Bytes that stand for a layer, a head and a place go where an engine of one rank has them."""
    whole = KINDS[kind]
    if whole.kv_heads <= 1:
        alike = len(heads)
    caches = [(each,) for each in parts_of(whole, heads, layers)]
    blocks = RankBlocks(caches, len(layers))
    data = np.random.default_rng(3).integers(0, 256, whole.block_bytes).astype(np.uint8)
    assert blocks.nbytes(0) == whole.block_bytes
    parts = blocks.cut(0, data)
    assert [len(part) for part in parts] == [own.block_bytes for (own,) in caches[::alike]]
    found = np.zeros_like(data)
    blocks.join(0, parts, found)
    if whole.state:  # what lies between states is nobody's
        offsets = whole.state_offsets
        kept = np.concatenate([np.arange(4 * at, 4 * (at + n)) for at, n in zip(offsets, whole.state, strict=False)])
        assert (found[kept] == data[kept]).all()
    else:
        assert (found == data).all()
    for place, ((own,), part) in enumerate(zip(caches[::alike], parts, strict=True)):
        stage = len(layers) - 1 - place * alike // len(heads)
        first = sum(layers[:stage])
        if whole.state:
            begin = 4 * whole.state_offsets[first]
            assert part.tobytes() == data[begin : begin + len(part)].tobytes()
            continue
        for layer in range(layers[stage]):
            at = (first + layer) * (whole.k_block_bytes + whole.v_block_bytes)
            mine = layer * (own.k_block_bytes + own.v_block_bytes)
            for of_whole, of_own in (
                (whole.k_block_bytes, own.k_block_bytes),
                (whole.v_block_bytes, own.v_block_bytes),
            ):
                each = of_own // own.kv_heads
                expected = data[at + own.heads_before * each : at + (own.heads_before + own.kv_heads) * each]
                assert part[mine : mine + of_own].tobytes() == expected.tobytes()
                at, mine = at + of_whole, mine + of_own


def test_a_head_that_all_ranks_have_moves_once() -> None:
    one = dataclasses.replace(KINDS["f32"], kv_heads=1)
    shared = [(one,)] * 4
    blocks = RankBlocks(shared, 1)
    data = np.random.default_rng(4).integers(0, 256, one.block_bytes).astype(np.uint8)
    assert [part.tobytes() for part in blocks.cut(0, data)] == [data.tobytes()]


def test_ranks_of_other_engines_are_noticed() -> None:
    two = parts_of(KINDS["f32"], HEADS[1][0], (3, 2))
    assert RankShares([(each,) for each in two], 2).whole == (KINDS["f32"],)
    others = {
        "the dtype": dataclasses.replace(two[3], dtype=DType.BF16),
        "the heads": dataclasses.replace(two[3], heads_behind=1),
        "the layers": dataclasses.replace(two[3], layers=(0,)),
    }
    for other in others.values():
        with pytest.raises(EngineError, match=r"do not belong together(.|\n)*rank 3: caches\.0"):
            RankShares([(each,) for each in (*two[:3], other)], 2)
    with pytest.raises(EngineError, match=r"do not belong together(.|\n)*1 groups(.|\n)*1, 2"):
        RankShares([(two[0],), (two[1], two[1])], 1)
    with pytest.raises(EngineError, match=r"3 ranks, 2 stages"):
        RankShares([(each,) for each in two[:3]], 2)
