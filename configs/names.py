"""Arguments that are names: what is no text is refused before anything compares it."""

from collections.abc import Collection

from ingot.errors import UsageError


def check_name(argument: str, value: object, known: Collection[str]) -> None:
    """Raises UsageError unless `value` is one of `known`. An array is not: it would compare element by element."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"unknown {argument}", expected=", ".join(known), got=repr(value)[:100])


def check_target(value: object) -> None:
    """Raises UsageError unless `value` is a text; which targets there are, their registry knows."""
    if not isinstance(value, str):
        raise UsageError(
            "target must be a name",
            expected='that of a target or of a family: "cpu/avx2", "cpu"',
            got=repr(value)[:100],
        )
