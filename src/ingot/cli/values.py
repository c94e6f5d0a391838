"""Kinds of option values: byte sizes, and the `--log_level` and `--json` that several commands share."""

import re
from collections.abc import Callable
from typing import Any

import click

from ingot.cli.console import LEVELS

_UNITS = {"": 1, "b": 1} | {
    unit.lower(): base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((f"{letter}iB", 1024), (f"{letter}B", 1000), (letter, 1024))
}


class ByteSize(click.ParamType):
    """`8GiB`, `500MB`, `2G` (binary) or plain bytes, as an int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            self.fail(f"{value!r} is not a size like 8GiB, 500MB or 1048576", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].lower()])


def bytes_in_words(nbytes: float) -> str:
    """`1536` → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def log_level(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--log_level`."""
    choice = click.Choice(list(LEVELS), case_sensitive=False)
    return click.option("--log_level", type=choice, default="info", show_default=True, help="How much is said on stderr.")(
        function
    )


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def target_isa(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--isa`."""
    choice = click.Choice(["avx2", "avx512", "amx"], case_sensitive=False)
    return click.option(
        "--isa", type=choice, help="Use at most this level of what the machine has; an engine that needs more is refused."
    )(function)
