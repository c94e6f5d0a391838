"""Expressions of a family's table over quantised weights: rows one below the other, and stacks of experts.

Parts may be floats, where a configuration leaves some modules unquantised: they stay as they are.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.configs.convert import WEIGHT_DTYPES
from ingot.convert.quantised.alike import made_alike
from ingot.convert.quantised.form import BLOCK, Piece, Quantised, float_rows, same_form, stacked, unpaired
from ingot.convert.quantised.order import with_columns_swapped, with_rows
from ingot.convert.weights import (
    Concat,
    Expr,
    KeyGroups,
    Regroup,
    Row,
    Shaped,
    Split,
    Stack,
    Swapped,
    Take,
    Tensor,
    Unpair,
    blocks,
    evaluate,
    held,
    infer,
    sources,
)
from ingot.dtypes import DType
from ingot.errors import UnsupportedModelError
from ingot.tensor_file import StoredTensor, TensorSpec

Tensors = Mapping[str, StoredTensor | Quantised]


def is_quantised(expr: Expr, tensors: Tensors) -> bool:
    """Whether some of what an expression reads is quantised."""
    return any(isinstance(tensors[name], Quantised) for name in sources(expr))


def as_computed(rows: Sequence[Row], tensors: Tensors) -> dict[str, Tensor]:
    """The tensors; floats that are merged with quantised ones have the type that those are computed in."""
    found: dict[str, Tensor] = dict(tensors)
    for row in rows:
        names = [name for name in sources(row.expr) if name in tensors]
        if any(isinstance(tensors[name], Quantised) for name in names):
            floats = (name for name in names if tensors[name].dtype in WEIGHT_DTYPES.values())
            found |= {name: TensorSpec(name=name, dtype=DType.F32, shape=tensors[name].shape) for name in floats}
    return found


def combined(name: str, expr: Expr, tensors: Tensors) -> Quantised:
    """The weight `name` that an expression makes."""
    parts, shape = _parts(expr, tensors), infer(expr, as_computed([Row(name, expr)], tensors))[1]
    if not all(same_form(parts[0], part) for part in parts) and (alike := made_alike(parts)) is not None:
        formats = ", ".join(dict.fromkeys(part.format for part in parts))
        parts = [dataclasses.replace(part, format=formats) for part in alike]
    return stacked(parts, shape, name)


def _parts(expr: Expr, tensors: Tensors) -> list[Quantised]:
    """In the order of their rows."""
    if not is_quantised(expr, tensors):
        floats = ((name, tensors[name]) for name in sources(expr))
        return [_floats(expr, {name: each for name, each in floats if isinstance(each, StoredTensor)})]
    if isinstance(expr, Take):
        found = tensors[expr.name]
        assert isinstance(found, Quantised), "is_quantised says so"
        return [found]
    if isinstance(expr, Stack) or (isinstance(expr, Concat) and expr.axis == 0):
        return [part for each in expr.of for part in _parts(each, tensors)]
    if isinstance(expr, Unpair):
        return [unpaired(part, expr.heads) for part in _parts(expr.of, tensors)]
    if isinstance(expr, Shaped):
        return _parts(expr.of, tensors)
    if isinstance(expr, Swapped) and expr.axis == 1 and len(infer(expr.of, tensors)[1]) == 2 and not expr.begin:
        return [with_columns_swapped(part, expr.outer, expr.inner) for part in _parts(expr.of, tensors)]
    if (part := _of_one(expr, tensors)) is not None:
        numbers = np.arange(part.rows).reshape(-1, 1)
        return [with_rows(part, np.asarray(evaluate(expr, lambda _: numbers), np.int64).reshape(-1))]
    raise UnsupportedModelError(
        "ingot needs a weight in another order than the file has it, and cannot reorder its quantised codes",
        where=", ".join(sources(expr)[:4]),
        hint="convert the model's original weights",
    )


def _floats(expr: Expr, tensors: Mapping[str, StoredTensor]) -> Quantised:
    """What an expression makes of floats alone."""
    dtype, (*outer, columns) = infer(expr, tensors)
    piece = Piece(
        dtype=dtype,
        shape=(int(np.prod(outer)), columns),
        read=functools.partial(blocks, expr, tensors, BLOCK),
        memory=memory_of_floats(expr, tensors),
    )
    return float_rows(", ".join(tensors), next(iter(tensors.values())).file, piece)


def memory_of_floats(expr: Expr, tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes that are held while an expression is made of floats, beyond a few blocks: itself, and its parts, before a
    change too."""
    changes = [each for name in sources(expr) if (each := tensors[name].change) is not None]
    whole = held(expr, tensors) * infer(expr, tensors)[0].itemsize
    return (3 if changes else 2) * whole + max((each.memory for each in changes), default=0)


def _of_one(expr: Expr, tensors: Tensors) -> Quantised | None:
    """The matrix of which an expression takes whole rows, in whatever order; None where it does something else."""
    while not isinstance(expr, Take):
        if not isinstance(expr, Regroup | KeyGroups | Split | Swapped) or getattr(expr, "axis", 0) != 0:
            return None
        expr = expr.of
    found = tensors[expr.name]
    return found if isinstance(found, Quantised) and len(found.shape) == 2 else None
