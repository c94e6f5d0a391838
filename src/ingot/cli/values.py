"""Kinds of option values, and the options that several commands share."""

import os
from collections.abc import Callable
from typing import Any

import click

from ingot.cli.console import LEVELS
from ingot.configs.runtime import COLLECTIVES, ISA_LEVELS
from ingot.configs.sizes import parse_bytes
from ingot.configs.speculation import read_speculation
from ingot.errors import UsageError

WEIGHT_ONLY = {"int8": "w8", "int4": "w4g128"}  # --weight_only_precision
positive = click.IntRange(min=1)


class LocalPath(click.Path):
    """A path that is not empty, as that of a variable without a value would be: it would mean this directory."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """See click.ParamType."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


def byte_size(option: str) -> Callable[[str], int]:
    """Reads `8GiB`, `500MB` or plain bytes as an int; `option` is named where that fails."""

    def size(text: str) -> int:
        return parse_bytes(text, name=option)

    return size


def weight_only(wanted: bool, precision: str | None) -> str | None:
    """The precision that `--use_weight_only` and `--weight_only_precision` ask for, if they do."""
    if precision is not None and not wanted:
        raise UsageError("--weight_only_precision needs --use_weight_only", hint="add --use_weight_only")
    return WEIGHT_ONLY[precision or "int8"] if wanted else None


def is_weight_only(precision: str | None) -> bool:
    """Whether products of this precision have quantised weights."""
    return precision is not None and precision.startswith("w")


def log_level(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--log_level`."""
    choice = click.Choice(list(LEVELS), case_sensitive=False)
    return click.option(
        "--log_level", type=choice, default="info", show_default=True, help="Set how much is printed on stderr."
    )(function)


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def use_mmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--use_mmap`."""
    return click.option(
        "--use_mmap",
        is_flag=True,
        help="Map the weights from the file, so that processes share them. Default: copy them into 2 MiB pages, "
        "which is faster.",
    )(function)


def ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options `--rank_timeout` and `--collectives`."""
    late = click.option(
        "--rank_timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="With several ranks: end all of them when one is late by this many seconds.",
    )
    where = click.option(
        "--collectives",
        type=click.Choice(COLLECTIVES),
        default="auto",
        show_default=True,
        help="With several ranks: exchange data through shared memory or MPI. auto is shm if all ranks are on "
        "one machine.",
    )
    return late(where(function))


def speculative_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the option `--speculative_config`, read."""
    return click.option(
        "--speculative_config",
        type=read_speculation,
        metavar="JSON",
        help="Draft further tokens, so that a step may bring several; the output stays the same. "
        '{"method": "ngram"} drafts what came after the same tokens before. Default: no drafts.',
    )(function)


def target_isa(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options `--target` and `--isa`."""
    choice = click.Choice(ISA_LEVELS, case_sensitive=False)
    isa = click.option("--isa", type=choice, help="Use at most this instruction set; refuse an engine that needs more.")
    target = click.option(
        "--target",
        metavar="NAME",
        help="Run this target of an engine that has several; cpu is its best CPU target for this machine. "
        "Default: the best target for this machine.",
    )
    return target(isa(function))
