"""Expressions of a family's table over quantised weights: rows one below the other, and stacks of experts."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ingot.convert.quantised.alike import made_alike
from ingot.convert.quantised.form import Quantised, same_form, stacked, unpaired
from ingot.convert.quantised.order import with_columns_swapped, with_rows
from ingot.convert.weights import (
    Concat,
    Expr,
    KeyGroups,
    Regroup,
    Shaped,
    Split,
    Stack,
    Swapped,
    Take,
    Unpair,
    evaluate,
    infer,
    sources,
)
from ingot.errors import CheckpointError, UnsupportedModelError
from ingot.tensor_file import StoredTensor

Tensors = Mapping[str, StoredTensor | Quantised]


def is_quantised(expr: Expr, tensors: Tensors) -> bool:
    """Whether some of what an expression reads is quantised. Raises CheckpointError where only a part is."""
    found = [name for name in sources(expr) if isinstance(tensors[name], Quantised)]
    if found and (others := [name for name in sources(expr) if name not in found]):
        raise CheckpointError(
            "only some of the tensors that are merged into one weight are quantised",
            where=f"{found[0]}, {others[0]}",
            expected="all of them quantised, or none",
        )
    return bool(found)


def combined(name: str, expr: Expr, tensors: Tensors) -> Quantised:
    """The weight `name` that an expression makes."""
    parts, shape = _parts(expr, tensors), infer(expr, tensors)[1]
    if not all(same_form(parts[0], part) for part in parts) and (alike := made_alike(parts)) is not None:
        formats = ", ".join(dict.fromkeys(part.format for part in parts))
        parts = [dataclasses.replace(part, format=formats) for part in alike]
    return stacked(parts, shape, name)


def _parts(expr: Expr, tensors: Tensors) -> list[Quantised]:
    """In the order of their rows."""
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


def _of_one(expr: Expr, tensors: Tensors) -> Quantised | None:
    """The matrix of which an expression takes whole rows, in whatever order; None where it does something else."""
    while not isinstance(expr, Take):
        if not isinstance(expr, Regroup | KeyGroups | Split | Swapped) or getattr(expr, "axis", 0) != 0:
            return None
        expr = expr.of
    found = tensors[expr.name]
    return found if isinstance(found, Quantised) and len(found.shape) == 2 else None
