"""The Plan: the ordered kernel calls of an Engine, with every buffer, weight and limit they use.

A Plan is data. `builder/lower.py` makes it, `engine.py` stores it as JSON, every target executes it. One Plan serves
any number of tokens up to the limits: a step carries T ragged tokens of S sequences and R rows of wanted logits.

    arena (one allocation, offsets fixed at build)            weights (mmapped, packed)
    ┌──────────┬─────────────┬───────┐                        ┌────────┬──────────────┬───┐
    │ hidden   │ qkv         │ ...   │  rows x cols x bytes   │ norm   │ qkv panels   │...│
    └──────────┴─────────────┴───────┘                        └────────┴──────────────┴───┘
"""

import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping
from typing import Annotated

from ingot.configs.exact import Between, Bytes, Count, Like, MultipleOf
from ingot.configs.read import write_record
from ingot.dtypes import KV_CODES, DType
from ingot.plan_tiles import Name, Tile, Tiling

PLAN_SCHEMA = 17
ALIGNMENT = 64  # of buffers and pieces: one cache line
MOST_HEADS = 4096  # of a layer
MOST_HEAD_DIM = 512  # where values lie apart from keys
HEAD_DIM_MULTIPLE = 4

Number = Annotated[int, Between(-(1 << 63), (1 << 63) - 1)]
Attr = Number | float | str

# What a field may hold, which `plan_json.py` checks as it reads; plugins/cpu checks the same bounds again.
RowCount = Annotated[int, Between(1, (1 << 21) - 1)]  # of a step: sessions have arrays of this length
Layer = Annotated[int, Between(0, 65534)]
Offset = Annotated[int, Between(0, (1 << 63) - 1), MultipleOf(ALIGNMENT)]
Kernel = Annotated[str, Like(r"[^.\0]+(\.[^.\0]+){2,}", "<op>.<dtype>.<isa or sm>")]
DrawKernel = Annotated[str, Like(r"([^.\0]+(\.[^.\0]+){2,})?", "<op>.<dtype>.<isa or sm>, or nothing")]
Digits = Annotated[str, Like("[0-9]{4}", "four digits")]


class Rows(enum.Enum):
    """What the first dimension of a buffer counts."""

    TOKENS = "tokens"  # the T tokens of a step, at most limits.max_num_tokens
    LOGITS = "logits"  # the R rows whose logits are wanted, at most limits.max_logit_rows


class Extent(enum.Enum):
    """What the first dimension of an input counts."""

    TOKENS = "tokens"  # the T tokens of a step
    LOGITS = "logits"  # the R rows whose logits are wanted
    SEQUENCES = "sequences"  # the S sequences
    BOUNDS = "sequence_bounds"  # S + 1: where each sequence begins, and where the last one ends
    BLOCKS = "sequence_blocks"  # the S sequences, each with a row of as many blocks as the longest has


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """What every step brings along, and steps of the plan read: see `step_inputs.py`."""

    name: Name
    dtype: DType
    extent: Extent

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype.value} by {self.extent.value})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """An activation [rows, cols] at a fixed byte offset of the arena (64-byte aligned).

    dtype  f32; bf16, f16 or f8 for what only products read, which take it so; i32 for lists of rows
    """

    name: Name
    rows: Rows
    cols: Count
    offset: Offset
    dtype: DType = DType.F32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlice:
    """Panels (or rows, for layout "row") [begin, end) of a weight, contiguous at `offset` of the weights section.

    For experts: the panels [begin, end) of each, one expert after the other.
    """

    begin: Annotated[int, Between(0, (1 << 31) - 1)]
    end: Count
    offset: Offset


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A packed constant.

    shape   logical shape: [rows, cols] of a table, [N, K] of a matrix product, [experts, N, K] of the products of
            experts, [n] of a vector
    layout  "row" or a panel layout, see `plugins/layouts.py`
    pieces  in order, without gaps; one piece per slice for panel layouts, one piece otherwise
    """

    name: Name
    dtype: DType
    shape: tuple[Count, ...]
    layout: Name
    nbytes: Bytes
    pieces: tuple[WeightSlice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One kernel call. `inputs` name buffers, weights, inputs of the plan, or "" for an absent optional one; `outputs`
    buffers or "".

    Order and meaning of inputs, outputs and attrs are fixed by the op (`plugins/ops/<op>.py`).
    """

    name: Name
    op: Name
    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """A paged KV cache of layers that are alike: keys and values of the tokens of a block, in each layer.

    window  0: a sequence keeps the blocks of all its tokens; else only those that a token at its end sees, which are
            `window` tokens, itself included
    layers  by the number that steps name them with; a layer is in one group. What one step writes there, the attention
            of several may read: a layer of the model that shares the cache of an earlier one names that layer's number,
            and takes no memory of its own
    state   empty; or what a sequence has in each layer in place of keys and values: so many float32 numbers, which
            every token changes. A "block" of such a group is a slot with the numbers of all its layers, and the block
            table says where the state lies after the tokens of a block: `-1` in the middle of a step's tokens keeps
            nothing there, a slot of its own is a snapshot. Its window is 2 (a token needs the state that the token
            before it left), its dtype f32, it has no heads
    latent  0; or how many of a key's numbers, its first ones, are the value too: such a group has one head, and a
            token's head_dim numbers lie there once, row after row
    heads_before, heads_behind  of a rank: key heads of the model before and behind the kv_heads that it has, which
            other ranks have; where there are more ranks than key heads, several have the same one

    K block: kv_heads * tokens_per_block * head_dim numbers
    V block: kv_heads * tokens_per_block * padded_dim numbers, padded_dim = head_dim rounded up to 16; latent: none

    int8, f8: behind the codes of each head of a block lie the scales of its tokens, float32 [tokens_per_block].
    How numbers lie in a block is the target's affair: no file holds a cache (docs/engine_format.md).
    """

    window: Annotated[int, Between(0, (1 << 31) - 1)] = 0
    layers: tuple[Layer, ...]
    kv_heads: Annotated[int, Between(0, MOST_HEADS)]
    head_dim: Annotated[int, Between(0, 1024), MultipleOf(HEAD_DIM_MULTIPLE)]
    tokens_per_block: Annotated[int, Between(16, 512), MultipleOf(16)]
    dtype: DType
    state: tuple[Count, ...] = ()
    latent: Annotated[int, Between(0, 1024), MultipleOf(4)] = 0
    heads_before: Annotated[int, Between(0, MOST_HEADS)] = 0
    heads_behind: Annotated[int, Between(0, MOST_HEADS)] = 0

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Where each layer's numbers begin in a slot, and where the last ones end, in float32 numbers."""
        sizes = [-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in self.state]
        return (0, *itertools.accumulate(sizes))

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent or self.head_dim

    @property
    def padded_dim(self) -> int:
        return -(-self.value_dim // 16) * 16

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are codes times scales."""
        return self.dtype in KV_CODES

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale that a token's key, and another that its value, has in each head."""
        return 4 if self.has_codes else 0

    @property
    def k_block_bytes(self) -> int:
        """Bytes of one block's keys in one layer."""
        return self.kv_heads * self.tokens_per_block * (self.head_dim * self.dtype.itemsize + self.scale_bytes)

    @property
    def v_block_bytes(self) -> int:
        """Bytes of one block's values in one layer."""
        if self.latent:
            return 0
        return self.kv_heads * self.tokens_per_block * (self.padded_dim * self.dtype.itemsize + self.scale_bytes)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens needs in the end."""
        longest = -(-num_tokens // self.tokens_per_block)
        if self.state:
            return min(longest, STATE_SLOTS)
        return min(longest, window_blocks(self.window, self.tokens_per_block)) if self.window else longest

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, keys and values; of a slot of states."""
        if self.state:
            return 4 * self.state_offsets[-1]
        return len(self.layers) * (self.k_block_bytes + self.v_block_bytes)


STATE_WINDOW = 2  # tokens: the one that left the state, and the one that takes it
STATE_SLOTS = 2  # that a sequence may hold while a step computes it: what it takes, and what it leaves
STATE_ALIGNMENT = 16  # float32 numbers: one cache line


def window_blocks(window: int, tokens_per_block: int) -> int:
    """Blocks that a request of any length may hold in a group with a window, while a step computes at most
    tokens_per_block of its tokens: window - 1 tokens before them, wherever in a block all these begin."""
    return -(-(window - 1) // tokens_per_block) + 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a step and a request may reach.

    max_seq_len counts prompt plus generated tokens; a model with P positions allows P + 1, since the last token
    is never fed back.
    """

    max_batch_size: RowCount
    max_input_len: Count
    max_seq_len: Count
    max_num_tokens: RowCount
    max_logit_rows: RowCount


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One kernel call of a variant: the kernel of `step`.

    inside         steps before it that this call computes along with its own, each row as it reads it: the norm of a
                   product's rows, which then has no call of its own; the queries of a rope_kv_write, whose own call is
                   then `kv_only`
    kv_only        it writes keys and values alone: a later call, which has the step `inside`, computes its queries
    private        every thread computes all rows, into memory of its own
    reads_private  of a product: its rows are those that every thread has in memory of its own
    waits          the threads wait for each other behind it
    """

    step: Name
    inside: tuple[Name, ...] = ()
    kv_only: bool = False
    private: bool = False
    reads_private: bool = False
    waits: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to run all steps of a plan, for batches of at most `most_tokens` tokens. Results do not depend on it."""

    name: Name
    most_tokens: RowCount
    calls: tuple[Call, ...]

    def called(self) -> frozenset[str]:
        """Steps that have a call of their own."""
        return frozenset(call.step for call in self.calls)

    def inside(self) -> frozenset[str]:
        """Steps that the call of another one computes, or a part of them."""
        return frozenset(name for call in self.calls for name in call.inside)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Attention of a step with at most `most_items` items, each a few new tokens of a sequence: their context is cut
    into at most `parts`, none of fewer than `least_tokens` tokens, which run side by side and are merged."""

    most_items: RowCount
    parts: Annotated[int, Between(1, 64)]
    least_tokens: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a target needs to run a step. `steps` are in execution order; the last one writes `logits`, and
    `draw_kernel` draws tokens from them. A pipeline stage that is not the last one has neither.

    caches   the KV memory: a pool of blocks for each group, all of as many tokens; a sequence has a block table in each
    inputs   what the steps read beside weights and buffers, by the names that sessions know
    variants what a session runs: the first whose `most_tokens` are enough. Without any, or where somebody looks at what
             steps write, the steps run one by one, as they stand
    tactics  products that a build has timed: step → how to compute it with 1, 2-8, 9-32 and more rows, a digit each.
             Steps that are not named take the shipped way, "0000"; results do not depend on it
    sum_parts  into how many parts the sums are cut that ranks divide, by `split_sums`; 1: into none
    decode_tokens  the most new tokens of a sequence that attention's kernels for decode take, by the heads of the whole
             model, so that all ranks and stages use the same kernels; 0: it has no such kernels
    splits   of attention, for more and more items, up to the largest batch; without any, contexts stay whole
    decode_sizes  numbers of sequences, ascending, of decode steps that are captured as CUDA graphs; a smaller batch is
             filled up to the next one
    tilings  of products, on targets that launch other kernels for other numbers of rows
    """

    vocab_size: Count
    max_positions: Count
    limits: Limits
    caches: tuple[CacheGroup, ...]
    inputs: tuple[Input, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    steps: tuple[Step, ...]
    arena_bytes: Bytes
    weight_bytes: Bytes
    logits: str
    draw_kernel: DrawKernel = ""
    sum_parts: Count = 1
    decode_tokens: Annotated[int, Between(0, 64)] = 0
    tactics: Mapping[str, Digits] = dataclasses.field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    splits: tuple[Split, ...] = ()
    decode_sizes: tuple[RowCount, ...] = ()
    tilings: tuple[Tiling, ...] = ()

    @property
    def stage(self) -> tuple[int, int]:
        """Number of the pipeline stage whose steps these are, and of how many. A single one makes all."""
        for step in self.steps:
            if "stages" in step.attrs:  # it sends to another stage, or receives
                return int(step.attrs["stage"]), int(step.attrs["stages"])
        return 0, 1

    @property
    def tokens_per_block(self) -> int:
        """The same in all cache groups."""
        return self.caches[0].tokens_per_block

    @property
    def num_layers(self) -> int:
        """Layers that keep something of a sequence: keys and values, or a state."""
        return sum(len(group.layers) for group in self.caches)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in every cache group with keys and values: what the tokens of a block take while no window
        has passed them."""
        return sum(group.block_bytes for group in self.caches if not group.state)

    def group_of(self, layer: int) -> int:
        """Index of the cache group that a layer is in."""
        return next(index for index, group in enumerate(self.caches) if layer in group.layers)

    def in_each(self, num_blocks: int, sequences: int | None = None) -> tuple[int, ...]:
        """As many blocks in each cache group: room for whole sequences, of which no block is given back. sequences: how
        many these are; then a group with states has a slot for each."""
        return tuple(sequences if group.state and sequences is not None else num_blocks for group in self.caches)

    def parts_of(self, items: int, longest: int) -> int:
        """Into how many parts attention cuts contexts. items: as of a Split; longest: tokens that one may see."""
        split = next((each for each in self.splits if items <= each.most_items), None)
        return 1 if split is None else max(1, min(split.parts, longest // split.least_tokens))

    def tiles_of(self, step: str) -> tuple[Tile, ...]:
        """Those of a step, by its name."""
        return next((each.tiles for each in self.tilings if step in each.steps), ())

    def variant(self, name: str) -> Variant:
        """A variant by its name; "" stands for the steps one by one."""
        return next((each for each in self.variants if each.name == name), self.one_by_one)

    @property
    def one_by_one(self) -> Variant:
        """Every step by itself, with all threads waiting behind it."""
        calls = tuple(Call(step=step.name) for step in self.steps)
        return Variant(name="", most_tokens=self.limits.max_num_tokens, calls=calls)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, enums by value; equal plans give equal text."""
        document = {"plan_schema": PLAN_SCHEMA, **write_record(self)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plans_to_json(plans: Mapping[str, Plan]) -> str:
    """The plans of one rank file, by target: canonical JSON as well."""
    return "{" + ",".join(f"{json.dumps(target)}:{plans[target].to_json()}" for target in sorted(plans)) + "}"
