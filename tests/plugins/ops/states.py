"""Runs an op that keeps a state: a sequence in chunks, with its slots."""

from collections.abc import Sequence

import numpy as np

from ingot.dtypes import DType
from ingot.plan import STATE_WINDOW, Attr, CacheGroup
from ingot.plugins.op import Array, Call, StateCache
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import make_batch, with_arrays

BLOCK = 16
GPU_OPS = {  # GPU targets have kernels of these; one that draws is no kernel call of a plan
    *("embedding", "rope_table", "rms_norm", "layer_norm", "matmul", "add", "activation"),
    *("rope_kv_write", "paged_attention", "gather_rows", "softcap", "scale"),
}
FP8_OPS = {  # cuda/sm90 has them all
    *("fp8_matmul", "fp8_moe_gate_up", "fp8_moe_down", "round_to_fp8", "round_slots_to_fp8")
}
CUDA_OPS = {  # cuda targets have these, too
    *("moe_route", "moe_gate_up", "moe_down", "add_gated", "sigmoid_gate", "cast", "sort_by_expert"),
    *("causal_conv", "linear_attention", "gated_norm"),
    *("latent_kv_write", "latent_attention", "head_matmul"),
    *("rope_query", "take_columns", "gather_columns", "join_columns"),
    *("mix_streams", "add_to_streams", "match_magnitude", "cut_below"),
    *("all_reduce", "all_gather", "send", "recv"),
    *FP8_OPS,
}


def state_group(op: str, attrs: dict[str, Attr]) -> CacheGroup:
    """Of one layer, with the state that the op keeps."""
    size = find_op(op).state
    assert size is not None
    return CacheGroup(
        window=STATE_WINDOW,
        layers=(0,),
        kv_heads=0,
        head_dim=0,
        tokens_per_block=BLOCK,
        dtype=DType.F32,
        state=(size(attrs),),
    )


def in_chunks(
    op: str, inputs: Sequence[Array | None], rows: int, attrs: dict[str, Attr], chunks: Sequence[int], table: list[int]
) -> tuple[Array, StateCache]:
    """The output of all tokens. rows: how many of the inputs, the first ones, have a row per token."""
    spec, cache = find_op(op), StateCache(state_group(op, attrs), 8)
    outputs: list[Array] = []
    past = 0
    for count in chunks:
        given = [
            each[past : past + count] if index < rows and each is not None else each
            for index, each in enumerate(inputs)
        ]
        batch = make_batch([0] * count, [count], [past], [table])
        outputs += spec.reference(Call(inputs=with_arrays(spec, given, batch), attrs=attrs, batch=batch, kv=[cache]))
        past += count
    return np.concatenate(outputs), cache
