"""What TensorRT targets choose from numbers alone: code of a GPU, memory of a step, blocks of a pool."""

import dataclasses
import itertools
import struct

import pytest

from ingot.builder.passes.split_contexts import split_contexts
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Weight, WeightSlice
from ingot.plugins.cuda.devices import DEVICES
from ingot.plugins.cuda.gpu import Gpu
from ingot.plugins.cuda.plan_facts import CODE_LAYOUT
from ingot.plugins.cuda.shapes import partial_rows, split_rules
from ingot.plugins.tensorrt.attention import PARTIAL_ROWS, Attention, workspace_bytes
from ingot.plugins.tensorrt.plan_file import read_header
from ingot.plugins.tensorrt.target import code_for
from ingot.plugins.tensorrt.tensors import MOST_ELEMENTS, most_blocks
from tests.hall.test_engine import make_plan


def test_both_words_of_a_header_are_looked_at() -> None:
    for first, second in ((b"vtrt", b"vtrx"), (b"xtrt", b"vtrt")):
        data = struct.pack("<4s12xQ4B4sI28x", first, 1234, 1, 7, 1, 116, second, 1)
        with pytest.raises(EngineError, match="not a TensorRT-RTX engine"):
            read_header(data, "a file")


@pytest.mark.parametrize(
    ("capability", "codes", "found"),
    [
        ((8, 6), ("80",), "80"),
        ((8, 9), ("89", "86", "80"), "89"),
        ((8, 6), ("89", "86", "80"), "86"),
        ((9, 0), ("80", "90a"), "90a"),
        ((12, 1), ("80", "120"), "120"),
        ((8, 0), ("86", "89"), None),
        ((9, 0), ("80",), None),
    ],
)
def test_a_gpu_runs_code_of_its_major_number_and_no_later_minor_one(
    capability: tuple[int, int], codes: tuple[str, ...], found: str | None
) -> None:
    gpu = Gpu(index=0, name="g", capability=capability, memory_bytes=1, multiprocessors=1)
    piece = (WeightSlice(begin=0, end=1, offset=0),)
    code = [
        Weight(name=each, dtype=DType.I8, shape=(1,), layout=f"{CODE_LAYOUT}sm_{each}", nbytes=1, pieces=piece)
        for each in codes
    ]
    plan = dataclasses.replace(make_plan(), weights=(*make_plan().weights, *code))
    if found is not None:
        assert code_for(plan, gpu).name == found
        return
    with pytest.raises(EngineError, match="no machine code for this GPU"):
        code_for(plan, gpu)


def test_the_workspace_has_room_for_all_parts() -> None:
    attention = Attention(
        layer=0,
        heads=4,
        kv_heads=2,
        head_dim=64,
        tokens_per_block=16,
        rotary=32,
        normed=0,
        interleaved=0,
        narrow=0,
        window=0,
        rope_scale=1.0,
        norm_eps=0.0,
        scale=1.0,
        softcap=0.0,
    )
    rows = PARTIAL_ROWS
    assert workspace_bytes(attention, 8) == 4 * (8 * 32 + 8 * 4 * 64 + rows * 64 + 2 * rows)


def test_no_plan_needs_more_room_for_parts() -> None:
    """On the largest GPU of the table, whatever the batch and the heads."""
    rules = split_rules(max(each.multiprocessors for each in DEVICES.values()))
    for batch, heads in itertools.product((1, 3, 64, 4096), (1, 5, 8, 128)):
        plan = make_plan()
        limits = dataclasses.replace(plan.limits, max_batch_size=batch, max_seq_len=1 << 20)
        cache = dataclasses.replace(plan.caches[0], kv_heads=heads, dtype=DType.BF16)
        made, _ = split_contexts(dataclasses.replace(plan, limits=limits, caches=(cache,)), rules)
        assert made.splits[-1].most_items == batch
        assert partial_rows(made) <= PARTIAL_ROWS


def test_a_pool_is_no_larger_than_a_tensor_may_be() -> None:
    plan = make_plan()  # 4 dims of keys, 16 of values
    assert most_blocks(plan) == MOST_ELEMENTS // (16 * 16)
    blocks = most_blocks(plan)
    assert (
        blocks * plan.caches[0].v_block_bytes // 4 <= MOST_ELEMENTS < (blocks + 1) * plan.caches[0].v_block_bytes // 4
    )
