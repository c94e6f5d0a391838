"""The launches of layers that keep a state: short convolutions, linear attention, and the norm behind it."""

import dataclasses
from collections.abc import Mapping

from ingot.errors import REBUILD, EngineError
from ingot.plan import Attr, Rows
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Launch, integer, number, pointer, row_grid

MAX_KEY_DIM = 256  # of linear attention: a warp keeps its columns of a state in registers
_THREADS, _STRIP = 256, 4 * 256  # channels of a block
_NORM_THREADS = 1024  # at most
_LINEAR_THREADS, _LINEAR_COLUMNS = 128, 32  # of a value
_TILE_DIMS, _FACTORS = 2048, 4  # of the keys of a tile of tokens; numbers of a token, beside its query, key and value
_TOKENS_OF_END, _MOST_ENDS = 16, 64  # of blocks of the KV cache, at least; thread blocks that share a sequence's


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Where a layer's states lie. runs: the tokens of each sequence; slots: where slot 0 has the layer's numbers;
    tables: of slots, `width` integers a sequence; size: numbers of a slot, all layers together."""

    runs: int
    slots: int
    tables: int
    width: int
    size: int

    def arguments(self) -> tuple[Argument, ...]:
        """What kernels take of it."""
        return pointer(self.runs), pointer(self.slots), pointer(self.tables), integer(self.width), integer(self.size)


def convolution_launches(
    at: Slots, attrs: Mapping[str, Attr], *, y: int, x: int, weight: int, bias: int, sequences: int
) -> list[Launch]:
    """A step of single tokens takes one launch, which also leaves the states. sequences: of the tokens."""
    channels, width = int(attrs["channels"]), int(attrs["width"])
    strips = -(-channels // _STRIP)

    def convolve(*, leaves: bool) -> Launch:
        def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
            single = counts.tokens == counts.sequences
            return (counts.tokens if single == leaves else 0), strips, 1

        arguments = (
            *(pointer(each) for each in (y, x, weight, bias, sequences)),
            *at.arguments(),
            *(integer(each) for each in (channels, width, attrs["activation"] == "silu", leaves)),
        )
        return Launch(kernel="causal_conv", grid=grid, threads=_THREADS, shared=0, arguments=arguments)

    def several(counts: Counts, splits: int) -> tuple[int, int, int]:
        if counts.tokens == counts.sequences:
            return 0, strips, 1
        return counts.sequences, strips, min(_MOST_ENDS, counts.tokens // counts.sequences // _TOKENS_OF_END + 1)

    leave = Launch(
        kernel="leave_inputs",
        grid=several,
        threads=_THREADS,
        shared=0,
        arguments=(pointer(x), *at.arguments(), integer(channels), integer(width)),
    )
    return [convolve(leaves=True), convolve(leaves=False), leave]


def linear_attention_launches(
    at: Slots, attrs: Mapping[str, Attr], *, y: int, x: int, dt: int, beta: int, a_log: int, skip: int
) -> list[Launch]:
    """One for steps of single tokens, one for others: both compute the same bits. Addresses are 0 where there is
    nothing. Raises EngineError for keys that no kernel has registers for."""
    shape = [int(attrs[name]) for name in ("heads", "key_heads", "key_dim", "value_dim", "values_first", "by_dim")]
    heads, _, key_dim, value_dim, _, by_dim = shape
    if key_dim > MAX_KEY_DIM:
        raise EngineError(
            "linear attention with keys of this size is not supported on cuda targets",
            where=f"layer {attrs['layer']}",
            expected=f"at most {MAX_KEY_DIM} numbers",
            got=str(key_dim),
            hint=REBUILD,
        )
    arguments = (
        *(pointer(each) for each in (y, x, dt, beta, a_log, skip)),
        *at.arguments(),
        *(integer(each) for each in shape),
        *(number(attrs[name]) for name in ("scale", "l2_eps", "dt_min", "dt_max")),
    )
    dims, strips = 128 if key_dim <= 128 else 256, -(-value_dim // _LINEAR_COLUMNS)

    def launch(kernel: str, shared: int, *, single: bool) -> Launch:
        def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
            return (counts.sequences if (counts.tokens == counts.sequences) == single else 0), heads, strips

        threads = _LINEAR_THREADS if single else 2 * _LINEAR_THREADS  # half of which prepare tiles for the others
        return Launch(kernel=f"{kernel}_{dims}", grid=grid, threads=threads, shared=shared, arguments=arguments)

    prompts = "mamba_prompts" if not beta else "kda_prompts" if by_dim else "delta_prompts"
    tokens, numbers = _TILE_DIMS // dims, (2 + by_dim) * dims + _LINEAR_COLUMNS + _FACTORS
    shared = 4 * tokens * (2 * numbers + _LINEAR_THREADS)  # of two tiles, and results of one
    return [launch("linear_attention", 0, single=True), launch(prompts, shared, single=False)]


def gated_norm_launch(
    attrs: Mapping[str, Attr],
    *,
    y: int,
    x: int,
    gate: int,
    weight: int,
    cols: int,
    weights: int,
    rows: Rows,
    narrow: bool,
) -> Launch:
    """weights: how many the norm has, for a group of columns or for all."""
    columns = int(attrs["columns"])
    arguments: tuple[Argument, ...] = (
        *(pointer(each) for each in (y, x, gate, weight)),
        integer(cols),
        integer(columns),
        number(attrs["eps"]),
        integer(attrs["norm_first"]),
        integer(attrs["activation"] == "sigmoid"),
        integer(weights != columns),
        integer(narrow),
    )
    threads = min(_NORM_THREADS, -(-columns // (4 * 32)) * 32)
    return Launch(
        kernel="gated_norm", grid=row_grid(rows, cols // columns), threads=threads, shared=0, arguments=arguments
    )
