"""What goes in and out of a network: the integers of a step, the pools of keys and values, the weights, the logits.

    ids, positions, sequences  [tokens]        rows  [rows]             tables  [sequences, width]
    decode  [decode, 4]    prefill  [prefill, 4]    items of the attention kernels, see cuda/step_tables.py
    splits  [splits]       only its length counts: into how many parts a decode item is cut
    keys.L  [blocks, kv_heads, tokens_per_block, head_dim]      values.L  [..., padded_dim]: updated in place
    weights                by the plan's names, where they lie in the weights section
    logits  [rows, vocab]

Lengths that change from step to step have names; a profile says between which numbers each may lie.
"""

import dataclasses
import enum
from collections.abc import Mapping

from ingot.configs.sizes import format_bytes
from ingot.dtypes import DType
from ingot.errors import BuildError, CapacityError
from ingot.plan import Limits, Plan, Rows
from ingot.plugins.cuda.plan_facts import CODE_LAYOUT, tiles_of
from ingot.plugins.cuda.shapes import MAX_SPLITS
from ingot.plugins.cuda.step_tables import ITEM, TableLayout
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.registry import find_op

LOGITS = "logits"
PROFILES = ("mixed", "decode")
UPDATED = ".updated"  # what a plugin calls the pools that it has written to
MOST_ELEMENTS = 2**31 - 1  # of one tensor


class Dim(enum.Enum):
    """A length that changes from step to step."""

    TOKENS = "tokens"
    ROWS = "rows"
    SEQUENCES = "sequences"
    DECODE = "decode"
    PREFILL = "prefill"
    SPLITS = "splits"
    BLOCKS = "blocks"


Shape = tuple[int | Dim, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """An input or output of the network."""

    name: str
    dtype: DType
    shape: Shape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """What a length may be; `usual` is what layers are tuned for."""

    least: int
    usual: int
    most: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A kind of step."""

    name: str
    ranges: Mapping[Dim, Range]


def step_inputs(plan: Plan) -> tuple[Tensor, ...]:
    """The integers of a step."""
    width = TableLayout.of(plan, tiles_of(plan)).width
    shapes: dict[str, Shape] = {
        "ids": (Dim.TOKENS,),
        "positions": (Dim.TOKENS,),
        "sequences": (Dim.TOKENS,),
        "rows": (Dim.ROWS,),
        "tables": (Dim.SEQUENCES, width),
        "decode": (Dim.DECODE, ITEM),
        "prefill": (Dim.PREFILL, ITEM),
        "splits": (Dim.SPLITS,),
    }
    return tuple(Tensor(name=name, dtype=DType.I32, shape=shape) for name, shape in shapes.items())


def pools(plan: Plan) -> tuple[Tensor, ...]:
    """Keys, then values, of every layer that has attention."""
    kv = plan.caches[0]
    layers = [int(step.attrs["layer"]) for step in plan.steps if find_op(step.op).reads_kv]
    head = (Dim.BLOCKS, kv.kv_heads, kv.tokens_per_block)
    return tuple(
        Tensor(name=name, dtype=kv.dtype, shape=(*head, dim))
        for layer in layers
        for name, dim in zip(pool_names(layer), (kv.head_dim, kv.padded_dim), strict=True)
    )


def pool_names(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values."""
    return f"keys.{layer}", f"values.{layer}"


def weights(plan: Plan) -> tuple[Tensor, ...]:
    """Every weight of the plan, but the machine code."""
    return tuple(
        Tensor(name=weight.name, dtype=weight.dtype, shape=weight.shape)
        for weight in plan.weights
        if not weight.layout.startswith(CODE_LAYOUT)
    )


def outputs(plan: Plan) -> tuple[Tensor, ...]:
    """The logits, and the pools once more."""
    logits = Tensor(name=LOGITS, dtype=DType.F32, shape=(Dim.ROWS, plan.vocab_size))
    return (logits, *(dataclasses.replace(pool, name=pool.name + UPDATED) for pool in pools(plan)))


def most_blocks(plan: Plan) -> int:
    """Blocks of a pool, which is one tensor."""
    (kv,) = plan.caches
    return MOST_ELEMENTS // (max(kv.k_block_bytes, kv.v_block_bytes) // kv.dtype.itemsize)


def require_blocks(plan: Plan, num_blocks: int) -> None:
    """Raises CapacityError where the pool of a layer, with its spare block, would be too large a tensor."""
    most = most_blocks(plan) - 1
    if num_blocks > most:
        raise CapacityError(
            "the KV cache is larger than TensorRT's tensors may be",
            where="kv_cache_memory",
            expected=f"at most {format_bytes(most * plan.block_bytes)}: {most} blocks",
            got=f"{format_bytes(num_blocks * plan.block_bytes)}: {num_blocks} blocks",
            hint="pass a smaller kv_cache_memory",
        )


def require_lengths(graph: OpGraph, limits: Limits) -> None:
    """Raises BuildError where the largest step would need a larger tensor than TensorRT's may be."""
    rows = {
        Rows.TOKENS: ("max_num_tokens", limits.max_num_tokens),
        Rows.LOGITS: ("max_logit_rows", limits.max_logit_rows),
    }
    for node in graph.nodes:
        for made in map(graph.activations.__getitem__, node.outputs):
            columns = made.cols * (2 if node.attrs.get("gated", 0) else 1)  # a product gives gate and up first
            limit, most = rows[made.rows]
            if most * columns > MOST_ELEMENTS:
                raise BuildError(
                    "a tensor of the largest step is larger than TensorRT's may be",
                    where=node.name,
                    expected=f"{limit} of at most {MOST_ELEMENTS // columns}",
                    got=f"{most} rows of {columns} numbers",
                    hint=f"build with a smaller {limit.replace('max_logit_rows', 'max_num_tokens')}",
                )


def product_node(name: str) -> str:
    """Name of the network's node that multiplies, of a product of the graph."""
    return f"{name}/product"


def profiles(plan: Plan) -> tuple[Profile, Profile]:
    """Any step within the limits; steps with one token of every sequence, all of whose logits are wanted."""
    limits, tiles = plan.limits, tiles_of(plan)
    most_decode = min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows)
    most_items = limits.max_num_tokens // tiles.prefill + limits.max_batch_size
    blocks = most_blocks(plan)
    per_sequence = -(-limits.max_seq_len // plan.tokens_per_block)
    shared = {
        Dim.BLOCKS: Range(least=1, usual=min(limits.max_batch_size * per_sequence + 1, blocks), most=blocks),
        Dim.SPLITS: Range(least=1, usual=1, most=MAX_SPLITS),
    }
    mixed = {
        Dim.TOKENS: Range(least=1, usual=limits.max_num_tokens, most=limits.max_num_tokens),
        Dim.ROWS: Range(least=1, usual=min(limits.max_batch_size, limits.max_logit_rows), most=limits.max_logit_rows),
        Dim.SEQUENCES: Range(least=1, usual=limits.max_batch_size, most=limits.max_batch_size),
        Dim.DECODE: Range(least=0, usual=limits.max_batch_size, most=limits.max_batch_size),
        Dim.PREFILL: Range(least=0, usual=most_items, most=most_items),
    }
    each = Range(least=1, usual=most_decode, most=most_decode)
    none = Range(least=0, usual=0, most=0)
    decode = {
        **dict.fromkeys((Dim.TOKENS, Dim.ROWS, Dim.SEQUENCES), each),
        Dim.DECODE: each if tiles.decode else none,  # groups too large for a decode item make items of prefill
        Dim.PREFILL: none if tiles.decode else each,
    }
    first, second = PROFILES
    return (Profile(name=first, ranges={**mixed, **shared}), Profile(name=second, ranges={**decode, **shared}))
