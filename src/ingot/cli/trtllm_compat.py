"""Options of TensorRT-LLM's `trtllm-build` that need no work here: what ingot always does, and what it refuses.

Options that change something (`--gemm_plugin`, `--max_output_len`, `--use_weight_only`, ...) are ordinary options of
`ingot build`; those that ingot has no use for are in `absent_options.py`. `docs/options.md` is written from all of
them, see `ingot.cli.options_page`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from ingot.cli.other_flags import LORA
from ingot.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """One option of the other tool.

    accepted  values that name what ingot does anyway; empty: the option is always refused
    bare      the value that the option means when it is given without one, or None if it needs one
    way       what ingot does, or what to use instead: the words of the note and of the refusal
    hidden    whether `--help` leaves it out; `ingot help trtllm` and docs/options.md have all
    """

    name: str
    accepted: tuple[str, ...]
    refused: tuple[str, ...] = ()
    bare: str | None = None
    flag: bool = False
    hidden: bool = False
    way: str

    @property
    def fate(self) -> str:
        match self.accepted:
            case ():
                return "refused"
            case ("disable",):
                return "always off"
            case (value,) if value not in ("enable", "set"):
                return f"only {value}"
            case _:
                return "always on"


def _switch(name: str, way: str) -> Spelling:
    return Spelling(name=name, accepted=("enable",), refused=("disable",), bare="enable", way=way)


def _never(name: str, way: str) -> Spelling:
    """A switch of something that ingot does not have: it may be off."""
    return Spelling(name=name, accepted=("disable",), refused=("enable",), bare="enable", hidden=True, way=way)


def _fused(name: str, way: str) -> Spelling:
    return dataclasses.replace(_switch(name, way), hidden=True)


_NCCL = "with several ranks, GPUs always exchange float32 numbers through NCCL; there is nothing to choose"
_TYPES = ("auto", "enable", "float16", "float32", "bfloat16")

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
        way="ingot has no beam search; num_return_sequences gives several samples of one prompt",
    ),
    Spelling(
        name="profiling_verbosity",
        accepted=("layer_names_only", "detailed"),
        refused=("none",),
        way="a plan always keeps the names of its kernel calls: `ingot inspect` prints them",
    ),
    Spelling(
        name="weight_streaming",
        accepted=("set",),
        bare="set",
        flag=True,
        way="not needed on CPUs: weights are copied into memory, or with --use_mmap mapped from the file",
    ),
    Spelling(
        name="multiple_profiles",
        accepted=("disable",),
        refused=("enable",),
        way="one plan serves any number of tokens up to the limits, so no further profiles are needed",
    ),
    Spelling(
        name="gather_context_logits",
        accepted=("set",),
        bare="set",
        flag=True,
        way="every engine can return the logits of prompts: output_context_logits=True in ModelRunner.generate",
    ),
    Spelling(
        name="gather_generation_logits",
        accepted=("set",),
        bare="set",
        flag=True,
        way="every engine can return the logits of answers: output_generation_logits=True in ModelRunner.generate",
    ),
    Spelling(
        name="strip_plan",
        accepted=(),
        flag=True,
        way="an engine always holds its packed weights; copy the Checkpoint instead, and build on the other machine",
    ),
    Spelling(
        name="gather_all_token_logits",
        accepted=("set",),
        bare="set",
        flag=True,
        hidden=True,
        way="every engine can return logits: output_context_logits, output_generation_logits of ModelRunner.generate",
    ),
    Spelling(
        name="moe_plugin",
        accepted=_TYPES,
        refused=("disable",),
        hidden=True,
        way="experts always run as fused kernels, in the precision that --precision sets",
    ),
    _fused("use_fused_mlp", "gate and up projections are always one matmul, which applies the activation too"),
    _fused("enable_xqa", "decoding always reads each KV head once for all query heads that share it"),
    _fused("multi_block_mode", "attention of a long context is always split among threads or blocks"),
    _fused("context_fmha_fp32_acc", "attention always adds in float32"),
    _fused("bert_context_fmha_fp32_acc", "attention always adds in float32"),
    _fused("paged_state", "states of recurrent layers are always kept in blocks, like the KV cache"),
    Spelling(
        name="nccl_plugin",
        accepted=("auto", "enable", "float32"),
        refused=("disable", "float16", "bfloat16"),
        bare="enable",
        hidden=True,
        way=_NCCL,
    ),
    _never("use_custom_all_reduce", _NCCL),
    _never("reduce_fusion", _NCCL),
    _never("user_buffer", _NCCL),
    _never("gemm_allreduce_plugin", _NCCL),
    _never("pp_reduce_scatter", _NCCL),
    _never("lora_plugin", LORA),
    _never("dora_plugin", LORA),
    _never("bert_attention_plugin", "encoder models are not supported: ingot runs decoder-only models"),
    _never(
        "mamba_conv1d_plugin",
        "the convolution of Mamba 2 always runs in a kernel of its own; there is nothing to choose",
    ),
    _never("lookup_plugin", "the token table is read by a kernel of its own; there is nothing to choose"),
    _never("low_latency_gemm_plugin", "--precision chooses the kernels; the build times them for few and many rows"),
    _never("low_latency_gemm_swiglu_plugin", "gate and up projections are always one matmul; the build times it"),
    _never("fp8_rowwise_gemm_plugin", "--activations fp8 rounds the inputs of FP8 weights, row by row"),
    _never("qserve_gemm_plugin", "4-bit weights with 8-bit inputs: --precision w4g128 --activations int8"),
    _never(
        "use_fp8_context_fmha", "no attention kernel computes in FP8; --kv_cache_dtype int8 makes the KV cache smaller"
    ),
    _never("fuse_fp4_quant", "ingot has no FP4 activations: see `ingot help precisions`"),
    _never(
        "norm_quant_fusion",
        "norms and the rounding after them are fused in every kernel that can do both; `ingot inspect` lists them",
    ),
    _never("attention_qk_half_accumulation", "attention always adds in float32"),
    _never("use_context_fmha_for_generation", "prefill and decoding each have their attention kernel"),
    _never(
        "streamingllm", "streaming with attention sinks is not supported; models with a sliding window keep their own"
    ),
    _never("manage_weights", "weights are read from the engine's file when it opens"),
    *(
        Spelling(name=name, accepted=(), way="use --timing_cache FILE, which is read before and written after timing")
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


def compat_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add every spelling as an option; `judge_all` reads the values."""
    for spelling in reversed(SPELLINGS):
        attributes: dict[str, Any] = {"help": f"[{spelling.fate}] {spelling.way}", "hidden": spelling.hidden}
        if spelling.flag:
            attributes |= {"is_flag": True, "flag_value": "set", "default": None}
        elif spelling.bare is not None:
            attributes |= {"is_flag": False, "flag_value": spelling.bare, "metavar": _values(spelling)}
        else:
            attributes["metavar"] = _values(spelling)
        function = click.option(f"--{spelling.name}", **attributes)(function)
    return function


def _values(spelling: Spelling) -> str:
    return "|".join(spelling.accepted) or "FILE"


def judge_all(given: dict[str, str | None]) -> list[str]:
    """Notes for the spellings that the command line holds. Raises UsageError for the first refused one."""
    return [judge(spelling, value) for spelling in SPELLINGS if (value := given.pop(spelling.name)) is not None]
