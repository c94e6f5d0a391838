"""What follows products of cuBLASLt, and what stands alone: sums, activations, changes of type."""

from ingot.dtypes import DType
from ingot.plan import Rows
from ingot.plugins.cuda.own_products import OwnProduct
from ingot.plugins.cuda.products import Product
from ingot.plugins.cuda.work import Launch, Multiply, Work, integer, pointer, row_grid

_THREADS, _STRIP = 256, 8 * 256  # columns of a block
_NORM_COLUMNS, _MOST_NORM_COLUMNS = 8, 8 * 1024  # that a thread and a block of residual_norm keep in registers


def epilogue_launch(
    y: int,
    x: int,
    *,
    cols: int,
    rows: Rows,
    kind: int,
    narrow: bool,
    ld: int = 0,
    up: int = 0,
    bias: int = 0,
    up_bias: int = 0,
    residual: int = 0,
    least: int = 0,
) -> Launch:
    """y = activation(x + bias) * (up + up_bias) + residual. Addresses, 0 where there is nothing. ld: columns of x and
    up, else `cols`; kind: the activation's number; narrow: y has the products' type; least: rows, for fewer nothing
    runs."""
    arguments = (
        pointer(y),
        pointer(x),
        pointer(up),
        pointer(bias),
        pointer(up_bias),
        pointer(residual),
        integer(cols),
        integer(ld or cols),
        integer(kind),
        integer(narrow),
    )
    grid = row_grid(rows, -(-cols // _STRIP), least)
    return Launch(kernel="epilogue", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def norm_block(hidden: int) -> tuple[int, int]:
    """(threads, bytes of shared memory) of residual_norm: a row that is not kept in registers lies in shared memory."""
    if hidden % 4 or hidden > _MOST_NORM_COLUMNS:
        return _THREADS, 4 * hidden
    return -(-hidden // (32 * _NORM_COLUMNS)) * 32, 0


def library_work(own: OwnProduct, sums: int, least: int) -> list[Work]:
    """The same product by cuBLASLt, for `least` rows and more. sums: float32 for all its columns."""
    plain = not own.bias and not own.gated and own.kind == 0
    direct = plain and not (own.residual and own.narrow)
    product = Product(
        x=own.x,
        weight=own.weight,
        y=own.y if direct else sums,
        y0=own.residual if direct else 0,
        n=own.n,
        k=own.k,
        dtype=own.dtype,
        out=own.dtype if direct and own.narrow else DType.F32,
    )
    work: list[Work] = [Multiply(product=product, rows=own.rows, least=least)]
    if direct:
        return work
    half = 4 * own.cols if own.gated else 0
    epilogue = epilogue_launch(
        own.y,
        sums,
        cols=own.cols,
        rows=own.rows,
        kind=own.kind,
        narrow=own.narrow,
        ld=own.n,
        up=sums + half if half else 0,
        bias=own.bias,
        up_bias=own.bias + half if own.bias and half else 0,
        residual=own.residual,
        least=least,
    )
    return [*work, epilogue]
