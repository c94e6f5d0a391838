"""The claim that a family's table makes every weight of its model, and that no tensor of the source is left over."""

from collections.abc import Collection, Mapping, Sequence

from ingot.configs.convert import WEIGHT_DTYPES
from ingot.convert.weights import Drop, Row, Shape, Tensor, infer, sources
from ingot.errors import CheckpointError

_LISTED = 20  # names shown in an error before "and n more"


def require_rows(rows: Sequence[Row], wanted: Collection[str]) -> None:
    """A family's table has a row for every weight of its models."""
    unnamed = set(wanted) - {row.name for row in rows}
    assert not unnamed, f"the family has no row for {sorted(unnamed)}"


def claim(
    rows: Sequence[Row], drops: Sequence[Drop], tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape]
) -> list[Row]:
    """The rows that the Graph wants. Raises CheckpointError unless every wanted weight can be made in its shape and
    every tensor of the source is used or dropped on purpose."""
    require_rows(rows, wanted)
    chosen = [row for row in rows if row.name in wanted]
    used = {name for row in chosen for name in sources(row.expr)}
    missing = used - set(tensors)
    unclaimed = set(tensors) - used - {drop.name for drop in drops}
    if missing or unclaimed:
        raise CheckpointError(
            "the tensors of the model do not match its config.json",
            expected=f"{len(missing)} that the files lack: {_listed(missing)}",
            got=f"{len(unclaimed)} that config.json does not ask for: {_listed(unclaimed)}",
            hint="check config.json (layers, biases, tied embeddings) against the files",
        )
    for row in chosen:
        if (dtype := infer(row.expr, tensors)[0]) not in WEIGHT_DTYPES.values():
            raise CheckpointError(
                f"weights of type {dtype.safetensors} are not supported",
                where=", ".join(sources(row.expr)),
                expected="F32, F16 or BF16",
                hint="save the model in one of these types first",
            )
    misshapen = [
        f"{', '.join(sources(row.expr))}: expected {list(wanted[row.name])}, got {list(shape)}"
        for row in chosen
        if (shape := infer(row.expr, tensors)[1]) != wanted[row.name]
    ]
    if misshapen:
        raise CheckpointError(
            "tensors have other shapes than config.json asks for",
            got=_listed(misshapen),
            hint="check the sizes in config.json against the files",
        )
    return chosen


def _listed(names: Collection[str]) -> str:
    if not names:
        return "none"
    shown = sorted(names)[:_LISTED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
