"""The launches of ops on residual streams side by side, on parts of rows, and on gates that are cut off."""

from collections.abc import Mapping, Sequence

from ingot.plan import Attr, Rows
from ingot.plugins.cuda.work import Launch, integer, number, pointer, row_grid

_THREADS, _STRIP = 256, 4 * 256  # columns of a block


def take_launch(attrs: Mapping[str, Attr], *, y: int, x: int, cols: int, rows: Rows) -> Launch:
    """cols: of y."""
    of, first, count = (integer(attrs[name]) for name in ("of", "first", "count"))
    arguments = (pointer(y), pointer(x), integer(cols), of, first, count)
    grid = row_grid(rows, -(-cols // _STRIP))
    return Launch(kernel="take_columns", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def gather_launch(*, y: int, x: int, order: int, cols: int, columns: int, rows: Rows, narrow: bool) -> Launch:
    """cols: of y; columns: of x."""
    arguments = (pointer(y), pointer(x), pointer(order), integer(cols), integer(columns), integer(narrow))
    grid = row_grid(rows, -(-cols // _STRIP))
    return Launch(kernel="gather_columns", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def join_launch(*, y: int, parts: Sequence[tuple[int, int]], rows: Rows) -> Launch:
    """parts: address and columns of each, two or three."""
    (a, first), (b, second), (c, third) = (*parts, (0, 0))[:3]
    cols = first + second + third
    arguments = (pointer(y), pointer(a), pointer(b), pointer(c), integer(cols), integer(first), integer(second))
    grid = row_grid(rows, -(-cols // _STRIP))
    return Launch(kernel="join_columns", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def mix_launch(*, y: int, x: int, coefs: int, columns: int, streams: int, rows: Rows) -> Launch:
    """columns: of a stream."""
    arguments = (pointer(y), pointer(x), pointer(coefs), integer(columns), integer(streams))
    grid = row_grid(rows, -(-columns // _STRIP))
    return Launch(kernel="mix_streams", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def add_launch(*, y: int, x: int, made: int, coefs: int, columns: int, streams: int, active: int, rows: Rows) -> Launch:
    """columns: of a stream. coefs: an address, or 0 without coefficients."""
    arguments = (
        pointer(y),
        pointer(x),
        pointer(made),
        pointer(coefs),
        integer(columns),
        integer(streams),
        integer(active),
    )
    grid = row_grid(rows, -(-columns // _STRIP))
    return Launch(kernel="add_to_streams", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def match_launch(attrs: Mapping[str, Attr], *, y: int, x: int, like: int, columns: int, rows: Rows) -> Launch:
    """columns: of a stream."""
    streams, joins = int(attrs["streams"]), int(attrs["joins"])
    arguments = (
        pointer(y),
        pointer(x),
        pointer(like),
        integer(columns),
        integer(streams),
        integer(joins),
        number(attrs["least"]),
    )
    grid = row_grid(rows, streams + joins)
    return Launch(kernel="match_magnitude", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def cut_launch(*, y: int, x: int, columns: int, deviations: float, rows: Rows) -> Launch:
    """A block for each row."""
    arguments = (pointer(y), pointer(x), integer(columns), number(deviations))
    return Launch(kernel="cut_below", grid=row_grid(rows), threads=_THREADS, shared=0, arguments=arguments)
