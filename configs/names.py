"""Arguments that are names: what is not text is refused before anything compares it."""

from collections.abc import Collection

from ingot.configs.read import nearest
from ingot.errors import UsageError


def check_name(argument: str, value: object, known: Collection[str]) -> None:
    """Raises UsageError unless `value` is one of `known`. An array is not: it would compare element by element."""
    if not isinstance(value, str) or value not in known:
        near = nearest(value, known) if isinstance(value, str) else None
        more = "`ingot help precisions` explains each" if argument == "precision" else None
        raise UsageError(f"unknown {argument}", expected=", ".join(known), got=repr(value)[:100], hint=near or more)


def check_target(value: object) -> None:
    """Raises UsageError unless `value` is a text; which targets there are, their registry knows."""
    if not isinstance(value, str):
        raise UsageError(
            "target must be a name",
            expected='that of a target or of a family: "cpu/avx2", "cpu"',
            got=repr(value)[:100],
        )
