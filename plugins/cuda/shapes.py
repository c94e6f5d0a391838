"""Sizes that kernels and session agree on: tiles of attention, shared memory, splits."""

import dataclasses

from ingot.dtypes import KV_CODES, DType
from ingot.plan import Plan
from ingot.plugins.registry import find_op
from ingot.plugins.split_rules import SplitRules

MAX_HEAD_DIM = 512
_WIDE = 256  # heads of more dims have kernels whose warps share the sums of a row
MAX_GROUP = 64  # query heads of one KV head
MAX_DECODE_GROUP = 16  # of these, in the kernel whose tile has 16 rows; larger groups take that of prefill
SPLIT_TOKENS = 64  # one tile of decode
MAX_SPLITS = 64
LATENT_ROWS = 32  # heads of tokens that a block of latent attention computes
MAX_LATENT_DIM, MAX_RANK = 640, 512  # of a row of the cache, and of its value: what fits shared memory and registers
_LATENT_TOKENS = 32  # of a tile
_WARPGROUP_DIMS = {64: 128, 128: 64}  # of heads → tokens of a tile
_SPLIT_ROWS = 16  # of an item and a KV head, whose partial sums a part leaves


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How the tokens of a sequence are cut into items, whose rows (tokens x group) fill a tile.

    decode: tokens of an item of the kernel of 16 rows, as the plan states it; prefill: of the one of 128 rows, or 64 or
    32 for large heads. Where layers have different heads, all take the same items: decode fits the smallest tile,
    prefill fills the largest, of which other layers make parts
    """

    decode: int
    prefill: int


def prefill_tokens(group: int, head_dim: int) -> int:
    """Tokens of a tile of prefill. group: query heads of one KV head, at most MAX_GROUP."""
    return max(1, prefill_rows(head_dim) // group)


def prefill_parts(tokens: int, group: int, head_dim: int) -> int:
    """Into how many tiles of a layer's heads an item of prefill is cut. tokens: of the item."""
    rows = prefill_rows(head_dim)
    return -(-tokens * group // rows) if head_dim > _WIDE else -(-tokens // (rows // group))


def latent_tokens(heads: int) -> int:
    """The same of latent attention, where a tile has all heads of its tokens."""
    return max(1, LATENT_ROWS // heads)


def latent_shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of latent attention over a 16-bit cache: queries, then a tile of the cache."""
    return 2 * (-(-head_dim // 16) * 16 + 8) * (LATENT_ROWS + _LATENT_TOKENS)


def prefill_rows(head_dim: int) -> int:
    """Rows of a tile of prefill: as many as leave room for their sums in registers."""
    return 128 if head_dim <= 128 else 64 if head_dim <= _WIDE else 32


def attention_shared_bytes(head_dim: int, *, decode: bool, codes: bool = False) -> int:
    """Dynamic shared memory of attention that multiplies 16-bit numbers: queries, then stages of K, then of V. codes:
    the scales of K and of V follow, and in prompts the codes of a tile that are under way; in decode, stages have codes
    in the place of numbers, where rows are whole 16 bytes."""
    padded = -(-head_dim // 16) * 16
    ahead = codes and head_dim % 16 == 0 and head_dim <= _WIDE
    if decode and ahead:
        row = head_dim if head_dim // 16 % 2 else head_dim + 16  # bytes
        return 2 * (padded + 8) * 16 + 2 * 64 * 2 * (row + 4)
    if head_dim > _WIDE:  # tiles are the smaller, the more rows there are
        rows, stages, tile = (16, 1, 32) if decode else (32, 1, 16)
    elif decode:
        rows, stages, tile = 16, 1 if padded > 128 else 2, 64
    elif padded <= 80:
        rows, stages, tile = 0, 2, 64  # queries lie in registers
    else:
        rows, stages, tile = prefill_rows(head_dim), 1, 32 if padded > (80 if codes else 192) else 64
    scales = (4 if ahead and not decode else stages) if codes else 0
    under_way = 2 * tile * head_dim if ahead else 0
    return 2 * (padded + 8) * (rows + 2 * stages * tile) + 4 * 2 * scales * tile + under_way


def takes_warpgroups(code: str, dtype: DType, head_dim: int, tokens_per_block: int) -> bool:
    """Whether attention of prompts has a kernel by the instructions of warpgroups. code: "sm_90a" is the machine code
    that has them; dtype: of the KV cache, whose blocks have powers of two of at least 16 tokens."""
    blocks = tokens_per_block >= 16 and tokens_per_block & (tokens_per_block - 1) == 0
    return code == "sm_90a" and dtype in (DType.BF16, DType.F16) and head_dim in _WARPGROUP_DIMS and blocks


def warpgroup_shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of that kernel: queries twice, then four stages of K, then of V."""
    return 2 * head_dim * (2 * prefill_rows(head_dim) + 2 * 4 * _WARPGROUP_DIMS[head_dim])


def split_rules(multiprocessors: int) -> SplitRules:
    """Four blocks for each of a GPU's multiprocessors, and no part of less than two tiles."""
    return SplitRules(
        blocks=4 * multiprocessors,
        parts=MAX_SPLITS,
        least_tokens=2 * SPLIT_TOKENS,
        dtypes=frozenset({DType.BF16, DType.F16, *KV_CODES}),
        group=MAX_DECODE_GROUP,
        latent_rows=LATENT_ROWS,
    )


def rows_of_item(plan: Plan) -> int:
    """Rows of partial sums that a part of a decode item leaves."""
    if any(each.latent for each in plan.caches):
        heads = max((int(step.attrs["heads"]) for step in plan.steps if find_op(step.op).reads_kv), default=1)
        return -(-heads // LATENT_ROWS) * LATENT_ROWS
    return _SPLIT_ROWS * max(each.kv_heads for each in plan.caches)


def partial_rows(plan: Plan) -> int:
    """Rows of partial sums that any step may need."""
    return rows_of_item(plan) * _most_parts(plan)


def partial_sums(plan: Plan) -> int:
    """Numbers of these rows, in the layers where they are most."""
    if any(each.latent for each in plan.caches):
        return partial_rows(plan) * max(each.head_dim for each in plan.caches)
    return _SPLIT_ROWS * _most_parts(plan) * max(each.kv_heads * each.head_dim for each in plan.caches)


def _most_parts(plan: Plan) -> int:
    """Parts of the contexts of all decode items of a step, where contexts are cut."""
    return max((each.most_items * each.parts for each in plan.splits if each.parts > 1), default=0)


def product_rows(rows: int, most: int) -> int:
    """How many rows a product is computed for, so that few shapes need a plan: at most an eighth more than `rows`, or
    8, or a power of two. What the rows behind the wanted ones hold does not matter, nor what becomes of them.

    most: rows that its matrices have room for
    """
    if rows <= 8:
        return min(most, 1 << (rows - 1).bit_length())
    step = max(8, 1 << ((rows - 1).bit_length() - 4))
    return min(most, -(-rows // step) * step)
