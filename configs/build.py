"""What a user asks of `ingot build`."""

import dataclasses
from pathlib import Path

from ingot.configs.names import check_name, check_target
from ingot.configs.recipe import NOT_YET, LayerRule
from ingot.dtypes import PRECISIONS
from ingot.errors import UsageError

_AUTO_OR = ("auto", *PRECISIONS)
ACTIVATIONS = ("auto", "bf16", "f32", "int8", "fp8")
KV_DTYPES = ("auto", "bf16", "f16", "f32", "int8", "fp8")
DEFAULT_MAX_BATCH_SIZE = 64
DEFAULT_MAX_INPUT_LEN = 2048
DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_NUM_TOKENS = 2048
MAX_ROWS = (1 << 21) - 1  # tokens or requests of one step
MAX_SUM_PARTS = 64
MAX_RANKS = 64
_COUNTS = ("max_batch_size", "max_input_len", "max_output_len", "max_num_tokens", "max_draft_len", "max_mem", "workers")
MIN_TOKENS_PER_BLOCK, MAX_TOKENS_PER_BLOCK = 16, 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """None is "not given": the default, lowered to what the model allows. Given values are kept or refused.

    target            a name of the target list; "cpu" is the best of this machine
    precision         of weights and tables; auto follows what the checkpoint stores
    lm_head_precision of the last matmul; None: w8 in w4 engines, else as all others
    screen_lm_head    also store lm_head in 4 bits, so that greedy steps of few sequences read half of it
    activations       how matmuls round their inputs: f32 not at all, bf16 where the target multiplies in bf16 (else as
                      f32), int8 per token with quantised weights, fp8 per token or per 128 columns with FP8
                      weights; auto: int8 where its error on a sample text is small, else bf16
    layers            rules of a recipe, which come after these three
    max_batch_size    requests running at once (64)
    max_input_len     prompt tokens of a request (2048)
    max_seq_len       prompt plus generated tokens of a request (4096)
    max_output_len    instead of max_seq_len: max_seq_len is max_input_len + max_output_len
    max_num_tokens    tokens of one step (2048)
    tp_size           ranks that share each layer; a power of two
    pp_size           pipeline stages that divide the layers; tp_size ranks each
    sum_parts         parts of each sum that ranks divide: a power of two, a multiple of tp_size. None: tp_size. Engines
                      of other numbers of parts differ in bits
    gemm_library      let a library compute matmuls where a target's sessions can call one (cuBLASLt, on cuda targets);
                      else the target's own kernels compute all
    tokens_per_block  of the KV cache: a multiple of 16 from 16 to 256
    kv_cache_dtype    auto: the precision, bf16 in quantised engines; int8 and fp8 (E4M3) have one scale for
                      each token and KV head
    max_mem           bytes the build may use
    autotune          time matmuls where this machine can run the target; else the shipped choice
    compress_weights  store bf16 weights in 12 bits, without loss, where all targets multiply with them; not with refit
    timing_cache      file with times of earlier builds, read and then written
    workers           threads that pack weights, each of which needs memory for its blocks. None: one for each core
    draft_dir         Checkpoint of a draft model, whose Engine goes into the folder `draft` of this one
    max_draft_len     drafts of each request for which a step has rows of logits, if it can. None: 256 rows in all
    lower_limits      lower given limits to what the model allows, instead of refusing them
    refit             store how weights are made of a Checkpoint's, so that `ingot refit` can put in others
    dry_run           decide everything, write nothing
    dump_passes       directory for the graph, and then the plan with its calls, after every pass
    """

    target: str = "cpu"
    precision: str = "auto"
    lm_head_precision: str | None = None
    screen_lm_head: bool = False
    activations: str = "auto"
    layers: tuple[LayerRule, ...] = ()
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_output_len: int | None = None
    max_num_tokens: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    sum_parts: int | None = None
    gemm_library: bool = True
    tokens_per_block: int = 32
    kv_cache_dtype: str = "auto"
    max_mem: int | None = None
    autotune: bool = True
    compress_weights: bool = True
    timing_cache: Path | None = None
    workers: int | None = None
    draft_dir: Path | None = None
    max_draft_len: int | None = None
    lower_limits: bool = False
    refit: bool = False
    dry_run: bool = False
    dump_passes: Path | None = None

    @property
    def ranks(self) -> int:
        """Processes that compute the engine together."""
        return self.tp_size * self.pp_size

    @property
    def parts(self) -> int:
        """Parts of each sum that ranks divide."""
        return self.tp_size if self.sum_parts is None else self.sum_parts

    def __post_init__(self) -> None:
        check_target(self.target)
        _check_name("precision", self.precision, _AUTO_OR, NOT_YET)
        _check_name("activations", self.activations, ACTIVATIONS, {})
        if self.lm_head_precision is not None:
            _check_name("lm_head_precision", self.lm_head_precision, PRECISIONS, NOT_YET)
        for rule in self.layers:
            if rule.precision is not None:
                _check_name(f"precision of {rule.pattern}:", rule.precision, PRECISIONS, NOT_YET)
            if rule.activations is not None:
                _check_name(f"activations of {rule.pattern}:", rule.activations, ACTIVATIONS, {})
        _check_name("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES, {})
        for name, minimum in (("max_seq_len", 2), *((name, 1) for name in _COUNTS)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
                raise UsageError(f"{name} must be a whole number, at least {minimum}", got=repr(value))
        for name in ("max_batch_size", "max_num_tokens"):
            if (getattr(self, name) or 0) > MAX_ROWS:
                raise UsageError(
                    f"{name} {getattr(self, name)} is too large",
                    expected=f"at most {MAX_ROWS}",
                    got=str(getattr(self, name)),
                )
        if self.max_output_len is not None and self.max_seq_len is not None:
            raise UsageError("max_output_len and max_seq_len set the same limit", hint="give one of them")
        if self.timing_cache is not None and not self.autotune:
            raise UsageError("timing_cache cannot be combined with no_autotune", hint="leave one of them out")
        self._check_ranks()
        self._check_fp8()
        self._check_draft()
        size = self.tokens_per_block
        if not isinstance(size, int) or size % 16 or not MIN_TOKENS_PER_BLOCK <= size <= MAX_TOKENS_PER_BLOCK:
            raise UsageError(
                f"tokens_per_block {size!r:.40} is not supported by the attention kernels",
                got=repr(size),
                expected=f"a multiple of 16 from {MIN_TOKENS_PER_BLOCK} to {MAX_TOKENS_PER_BLOCK}",
            )

    def _check_draft(self) -> None:
        if self.draft_dir is not None and self.refit:
            raise UsageError("draft_dir cannot be combined with refit", hint="leave one of them out")

    def _check_fp8(self) -> None:
        """A row's bits depend on how many rows the step has, and its scale on all of its columns."""
        if "fp8" not in (self.activations, *(rule.activations for rule in self.layers)):
            return
        if self.parts > 1:
            option = f"--tp_size {self.tp_size}" if self.tp_size > 1 else f"--sum_parts {self.parts}"
            raise UsageError(
                f"FP8 activations cannot be combined with {option}",
                hint="give --activations bf16: each rank has some columns of a row, which has one scale",
            )
        if not self.gemm_library:
            raise UsageError(
                "FP8 activations cannot be combined with --gemm_plugin disable",
                hint="give --activations bf16: with FP8 a row has other bits in a large batch than in a small one",
            )

    def _check_ranks(self) -> None:
        _check_parts("tp_size", self.tp_size)
        _check_parts("sum_parts", self.parts)
        if not isinstance(self.pp_size, int) or not 1 <= self.pp_size <= MAX_RANKS // self.tp_size:
            raise UsageError(
                f"--pp_size {self.pp_size} is out of range",
                expected=f"1 to {MAX_RANKS // self.tp_size}: an engine has at most {MAX_RANKS} ranks",
                got=repr(self.pp_size),
            )
        if self.parts % self.tp_size:
            raise UsageError(
                f"--sum_parts {self.parts} is not a multiple of --tp_size",
                expected=f"a multiple of {self.tp_size}",
                got=f"--sum_parts {self.parts}",
            )
        if self.tp_size > 1 and self.screen_lm_head:
            raise UsageError("--screen_lm_head cannot be combined with --tp_size", hint="leave --screen_lm_head out")


def _check_parts(name: str, parts: int) -> None:
    if not isinstance(parts, int) or not 1 <= parts <= MAX_SUM_PARTS or parts & (parts - 1):
        raise UsageError(f"{name} must be a power of two", expected=f"1, 2, 4, ... {MAX_SUM_PARTS}", got=repr(parts))


def _check_name(option: str, value: str, known: tuple[str, ...], not_yet: dict[str, str]) -> None:
    if isinstance(value, str) and value in not_yet:
        raise UsageError(f"{option} {value} cannot be built: {not_yet[value]}", expected=", ".join(known))
    check_name(option, value, known)
