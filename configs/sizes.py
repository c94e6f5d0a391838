"""Amounts of memory as people write them: "2GiB", "512 MiB", "1.5GB", "1000"."""

import re

from ingot.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}


def parse_bytes(size: int | str, *, name: str) -> int:
    """Bytes in `size`; a bare number counts bytes. `name` is the option, for the error."""
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise UsageError(f"{name} is not an amount of memory", expected="e.g. 2GiB or 512MiB", got=repr(size))
        count = int(float(match[1]) * unit)
    if count <= 0:
        expected = "e.g. 2GiB or 512MiB; a number without a unit counts bytes"
        raise UsageError(f"{name} must be at least 1 byte", expected=expected, got=repr(size))
    return count


def format_bytes(count: int) -> str:
    """E.g. "1.5 GiB"."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"
