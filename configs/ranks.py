"""What the options for ranks ask of a model: rules that `convert`, which only stores the options, shares with
`build`."""

from ingot.errors import UsageError


def too_many_stages(option: str, stages: int, most: int, layers: str) -> UsageError:
    """The error for a model that cannot be cut into so many stages. layers: how many it has, of each cache group."""
    return UsageError(
        f"{option} {stages} is too large for this model",
        where=f"{option} {stages}",
        expected=f"{option} {most}: each stage must have a layer of every cache group",
        got=f"{layers} layers; layers that read each other's keys stay in one stage",
        hint=f"give a smaller {option}",
    )


def require_parts(option: str, parts: int, place: str, columns: int, size: int, *, groups: bool = False) -> None:
    """Raise UsageError where so many columns cannot be cut into parts of whole pieces of this size. groups: whether
    the size is that of a quantisation group too."""
    if -(-columns // size) < parts:
        raise UsageError(
            f"{option} {parts} is too large for a matmul of this model",
            where=f"{option}: {place}",
            expected=f"at least {parts} x {size} columns: a part must hold whole heads and quantisation groups",
            got=f"{columns} columns",
            hint=f"give a smaller {option}" + (", or a smaller group" if groups else ""),
        )
