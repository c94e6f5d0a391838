"""Options of TensorRT-LLM's `trtllm-build` that need no work here: what ingot always does, and what it refuses.

Options that change something (`--gemm_plugin`, `--max_output_len`, `--use_weight_only`, ...) are ordinary options of
`ingot build`. `docs/options.md` is written from both, see `ingot.cli.options_page`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from ingot.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """One option of the other tool.

    accepted  values that name what ingot does anyway; empty: the option is always refused
    bare      the value that the option means when it is given without one, or None if it needs one
    way       what ingot does, or what to use instead: the words of the note and of the refusal
    """

    name: str
    accepted: tuple[str, ...]
    refused: tuple[str, ...] = ()
    bare: str | None = None
    flag: bool = False
    way: str

    @property
    def fate(self) -> str:
        return "always on" if self.accepted else "refused"


def _switch(name: str, way: str) -> Spelling:
    return Spelling(name=name, accepted=("enable",), refused=("disable",), bare="enable", way=way)


SPELLINGS = (
    Spelling(
        name="gpt_attention_plugin",
        accepted=("auto", "enable", "float32", "float16", "bfloat16"),
        refused=("disable",),
        bare="enable",
        way="attention always runs as one paged-attention op; --kv_cache_dtype sets the type of the cache",
    ),
    _switch("paged_kv_cache", "the KV cache is always paged; --tokens_per_block sets the block size"),
    _switch("remove_input_padding", "steps are always ragged: no padding is stored or computed"),
    _switch("context_fmha", "prefill attention is always fused and tiled"),
    _switch("use_paged_context_fmha", "prefill attention always reads the paged cache, so chunks and prefixes work"),
    Spelling(
        name="kv_cache_type",
        accepted=("paged",),
        refused=("continuous", "disabled"),
        way="the KV cache is always paged; --tokens_per_block sets the block size",
    ),
    Spelling(
        name="max_beam_width",
        accepted=("1",),
        refused=("2 and more",),
        way="beam search does not exist yet; num_return_sequences gives several samples of one prompt",
    ),
    Spelling(
        name="workers",
        accepted=("1",),
        refused=("2 and more",),
        way="an engine has one rank in this version, and one process builds a rank",
    ),
    Spelling(
        name="profiling_verbosity",
        accepted=("layer_names_only", "detailed"),
        refused=("none",),
        way="a plan always keeps the names of its steps: `ingot inspect` prints them",
    ),
    Spelling(
        name="weight_streaming",
        accepted=("set",),
        bare="set",
        flag=True,
        way="weights are always mapped from the file and paged in when they are used",
    ),
    Spelling(
        name="multiple_profiles",
        accepted=("disable",),
        refused=("enable",),
        way="one plan serves any number of tokens up to the limits, so there is nothing to multiply",
    ),
    Spelling(
        name="gather_context_logits",
        accepted=("set",),
        bare="set",
        flag=True,
        way="every engine can return them: output_context_logits=True in ModelRunner.generate",
    ),
    Spelling(
        name="gather_generation_logits",
        accepted=("set",),
        bare="set",
        flag=True,
        way="every engine can return them: output_generation_logits=True in ModelRunner.generate",
    ),
    Spelling(
        name="strip_plan",
        accepted=(),
        flag=True,
        way="an engine is self-contained; the file without packed weights is the Checkpoint, which builds in seconds",
    ),
    *(
        Spelling(name=name, accepted=(), way="--timing_cache FILE is read before and written after timing")
        for name in ("input_timing_cache", "output_timing_cache")
    ),
)


def judge(spelling: Spelling, value: str) -> str:
    """The note for an accepted value. Raises UsageError for any other."""
    if value in spelling.accepted:
        return f"--{spelling.name}: {spelling.way}"
    raise UsageError(
        f"--{spelling.name} is refused" if spelling.flag else f"--{spelling.name} {value} is refused",
        expected=" or ".join(spelling.accepted) if spelling.accepted and not spelling.flag else None,
        hint=spelling.way,
    )


def spelling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add every spelling as an option; `judge_all` reads the values."""
    for spelling in reversed(SPELLINGS):
        words = f"[{spelling.fate}] {spelling.way}"
        if spelling.flag:
            option = click.option(f"--{spelling.name}", is_flag=True, flag_value="set", default=None, help=words)
        elif spelling.bare is not None:
            option = click.option(
                f"--{spelling.name}", is_flag=False, flag_value=spelling.bare, metavar=_values(spelling), help=words
            )
        else:
            option = click.option(f"--{spelling.name}", metavar=_values(spelling), help=words)
        function = option(function)
    return function


def _values(spelling: Spelling) -> str:
    return "|".join(spelling.accepted) or "FILE"


def judge_all(given: dict[str, str | None]) -> list[str]:
    """Notes for the spellings that the command line holds. Raises UsageError for the first refused one."""
    return [judge(spelling, value) for spelling in SPELLINGS if (value := given.pop(spelling.name)) is not None]
