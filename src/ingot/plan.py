"""The Plan: the ordered kernel calls of an Engine, with every buffer, weight and limit they use.

A Plan is data. `builder/lower.py` makes it, `engine.py` stores it as JSON, every target executes it. One Plan serves
any number of tokens up to the limits: a step carries T ragged tokens of S sequences and R rows of wanted logits.

    arena (one allocation, offsets fixed at build)            weights (mmapped, packed)
    ┌──────────┬─────────────┬───────┐                        ┌────────┬──────────────┬───┐
    │ hidden   │ qkv         │ ...   │  rows x cols x 4 bytes │ norm   │ qkv panels   │...│
    └──────────┴─────────────┴───────┘                        └────────┴──────────────┴───┘
"""

import contextlib
import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.dtypes import DType
from ingot.errors import EngineError

PLAN_SCHEMA = 3

Attr = int | float | str


class Rows(enum.Enum):
    """What the first dimension of a buffer counts."""

    TOKENS = "tokens"  # the T tokens of a step, at most limits.max_num_tokens
    LOGITS = "logits"  # the R rows whose logits are wanted, at most limits.max_logit_rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """An activation [rows, cols], float32, at a fixed byte offset of the arena (64-byte aligned)."""

    name: str
    rows: Rows
    cols: int
    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Panels (or rows, for layout "row") [begin, end) of a weight, contiguous at `offset` of the weights section.

    Of experts: the panels [begin, end) of each, one expert after the other.
    """

    begin: int
    end: int
    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A packed constant.

    shape   logical shape: [rows, cols] of a table, [N, K] of a matrix product, [experts, N, K] of the products of
            experts, [n] of a vector
    layout  "row" or a panel layout, see `plugins/layouts.py`
    pieces  in order, without gaps; one piece per thread shard for panel layouts, one piece otherwise
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: str
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One kernel call. `inputs` and `outputs` name buffers, weights or "" for an absent optional input.

    Order and meaning of inputs, outputs and attrs are fixed by the op (`plugins/ops/<op>.py`).
    """

    name: str
    op: str
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """The paged KV cache: keys and values of the tokens of a block, in each layer.

    K block: kv_heads * tokens_per_block * head_dim numbers
    V block: kv_heads * tokens_per_block * padded_dim numbers, padded_dim = head_dim rounded up to 16

    int8: behind the codes of each head of a block lie the scales of its tokens, float32 [tokens_per_block].
    How numbers lie in a block is the target's affair: no file holds a cache (docs/engine_format.md).
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: DType

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale that a token's key, and another that its value, has in each head."""
        return 4 if self.dtype is DType.I8 else 0

    @property
    def k_block_bytes(self) -> int:
        """Bytes of one block's keys in one layer."""
        return self.kv_heads * self.tokens_per_block * (self.head_dim * self.dtype.itemsize + self.scale_bytes)

    @property
    def v_block_bytes(self) -> int:
        """Bytes of one block's values in one layer."""
        return self.kv_heads * self.tokens_per_block * (self.padded_dim * self.dtype.itemsize + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * (self.k_block_bytes + self.v_block_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a step and a request may reach.

    max_seq_len counts prompt plus generated tokens; a model with P positions allows P + 1, since the last token
    is never fed back.
    """

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_logit_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a target needs to run a step. `steps` are in execution order; the last one writes `logits`.

    tactics  products that a build has timed: step → how to compute it with 1, 2-8, 9-32 and more rows, a digit each.
             Steps that are not named take the shipped way, "0000"; results do not depend on it
    screen   nothing, or two steps that a session may take in place of the last one where only the best token of each
             row is wanted: a product with half the bytes, and the op `screen`. Tokens do not depend on it
    """

    vocab_size: int
    max_positions: int
    limits: Limits
    kv: KvLayout
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    weight_bytes: int
    logits: str
    tactics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    screen: tuple[Step, ...] = ()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, enums by value; equal plans give equal text."""
        document = {"plan_schema": PLAN_SCHEMA, **_to_plain(self)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Inverse of `to_json`. Raises EngineError on anything else."""
        with _words():
            return _plan_from(json.loads(text))


def plans_to_json(plans: Mapping[str, Plan]) -> str:
    """The plans of one rank file, by target: canonical JSON as well."""
    return "{" + ",".join(f"{json.dumps(target)}:{plans[target].to_json()}" for target in sorted(plans)) + "}"


def plan_from_json(text: str, target: str) -> Plan:
    """The plan of one target out of what `plans_to_json` gave. Raises EngineError on anything else."""
    with _words():
        plans = json.loads(text)
        if target not in plans:
            raise EngineError(
                "the rank file holds no plan for this target", expected=target, got=", ".join(sorted(plans)),
                hint="it is another engine's: copy the engine again, or build it again",
            )  # fmt: skip
        return _plan_from(plans[target])


@contextlib.contextmanager
def _words() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError("the engine's plan is not readable", got=repr(error), hint="rebuild the engine") from error


def _to_plain(value: object) -> Any:
    if type(value) in (str, int, float):  # most are
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    return value


def _plan_from(document: dict[str, Any]) -> Plan:
    schema = document["plan_schema"]
    if schema != PLAN_SCHEMA:
        raise EngineError(
            "the engine's plan has another schema", expected=str(PLAN_SCHEMA), got=str(schema),
            hint="rebuild the engine with this version of ingot",
        )  # fmt: skip
    kv = document["kv"]
    if strangers := set(document["tactics"]) - {step["name"] for step in document["steps"]}:
        raise ValueError(f"tactics of steps that are not there: {', '.join(sorted(strangers))}")
    return Plan(
        vocab_size=document["vocab_size"],
        max_positions=document["max_positions"],
        limits=Limits(**document["limits"]),
        kv=KvLayout(**{**kv, "dtype": DType(kv["dtype"])}),
        buffers=tuple(Buffer(**{**item, "rows": Rows(item["rows"])}) for item in document["buffers"]),
        weights=tuple(_weight_from(item) for item in document["weights"]),
        steps=tuple(_step_from(item) for item in document["steps"]),
        arena_bytes=document["arena_bytes"],
        weight_bytes=document["weight_bytes"],
        logits=document["logits"],
        tactics=document["tactics"],
        screen=tuple(_step_from(item) for item in document["screen"]),
    )


def _weight_from(item: dict[str, Any]) -> Weight:
    pieces = tuple(Piece(**piece) for piece in item["pieces"])
    return Weight(**{**item, "dtype": DType(item["dtype"]), "shape": tuple(item["shape"]), "pieces": pieces})


def _step_from(item: dict[str, Any]) -> Step:
    return Step(**{**item, "inputs": tuple(item["inputs"]), "outputs": tuple(item["outputs"])})
