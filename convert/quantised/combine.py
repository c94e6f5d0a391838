"""Expressions of a family's table over quantised weights: rows one below the other, and stacks of experts."""

from collections.abc import Mapping

from ingot.convert.quantised.form import Quantised, stacked, unpaired
from ingot.convert.weights import Concat, Expr, Stack, Take, Unpair, infer, sources
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
    return stacked(_parts(expr, tensors), infer(expr, tensors)[1], name)


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
    raise UnsupportedModelError(
        "this family stores a weight in another order, and a quantised weight cannot be reordered",
        where=", ".join(sources(expr)[:4]),
        got=type(expr).__name__,
        hint="convert the model's original weights",
    )
