"""The texts of `ingot help TOPIC`: questions that come up at the command line, answered in a screen or less."""

import dataclasses
from collections.abc import Callable, Sequence

from ingot.cli.absent_options import ABSENT
from ingot.cli.exit_codes import EXIT_CODES
from ingot.cli.llama_cpp_flags import LLAMA_CPP
from ingot.cli.other_flags import Flag
from ingot.cli.trtllm_compat import SPELLINGS
from ingot.cli.vllm_flags import VLLM
from ingot.convert.family import family_names
from ingot.convert.wrapped import WRAPPERS
from ingot.plugins.registry import targets


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One topic. summary: a line for the list of topics; text: makes the page, its paragraphs and rows unwrapped."""

    summary: str
    text: Callable[[], str]


def _exit_codes() -> str:
    rows = "\n".join(f"{code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    return f"Every command ends with one of these exit codes.\n\n{rows}"


def _targets() -> str:
    names = ", ".join(target.name for target in targets())
    return f"""\
A target is a kind of machine. `ingot build --target T` packs weights and chooses kernels for it.

cpu           the best instruction set of the machine that builds. This is the default.
cpu/avx2      x86-64 CPUs with AVX2. Name it if the engine must run on older CPUs than the one that builds.
cpu/avxvnni   cpu/avx2 and AVX-VNNI
cpu/avx512    AVX-512 with VNNI; cpu/avx512bf16 adds BF16, cpu/amx adds tiles
cuda/smXX     an NVIDIA GPU of compute capability X.X
tensorrt-rtx  NVIDIA GPUs through TensorRT-RTX; tensorrt/smXX through the full TensorRT
ref           numpy, slow, for comparison

One engine can hold several targets: --target cpu/avx2,cpu/avx512,cpu/amx. At start ingot takes the best one that the \
machine can run; `ingot run --target T` and `--isa I` choose.

`ingot doctor` says which targets this machine can build and run, and what is missing for the others.
All: {names}"""


def _precisions() -> str:
    return """\
A precision says how weights are stored. `ingot build --precision P`:

f32, bf16     floats of 32 and 16 bits; f16 on GPUs
w8            8 bits, one scale per row: half the memory of bf16
w4g128        4 bits, groups of 128: about a quarter of bf16; w4g64 and w4g32 are larger and closer to the source
auto          as the Checkpoint stores them; codes of quantised models stay (w4tgG, w6kgG, ...). This is the default.

Decoding reads every weight once per step, so fewer bits mean more tokens per second as well as less memory.
--lm_head_precision sets the last matmul alone; --activations sets how matmuls round their inputs.
`ingot verify ENGINE --against CHECKPOINT` measures what a precision costs: KL divergence, top-1 agreement, perplexity.
cuda targets take w8 and w4gG too, TensorRT targets f32, bf16 and f16 only. From a \
quantised checkpoint (GGUF, AWQ, GPTQ, ...), `auto` keeps integer codes of up to 8 bits and FP8 on CPUs and cuda \
targets; TensorRT targets store floats."""


def _memory() -> str:
    return """\
Serving needs memory for four things. `ingot inspect ENGINE` prints the first three of them.

weights       the engine's size on disk. Processes share them with --use_mmap; else each has a copy.
KV cache      bytes per token x tokens held. --kv_cache_memory 4GiB caps it. Without the option it takes what \
max_batch_size x max_seq_len needs, and at most 40 % of the memory that is free after the weights were loaded.
activations   fixed by max_num_tokens and max_batch_size of the build
Python        about 100 MiB

Requests that find no room in the KV cache wait, or are preempted and computed again.
`ingot convert` and `ingot build` print what they need before they start; \
--max_mem 8GiB refuses work that needs more."""


def _limits() -> str:
    return """\
`ingot build` fixes what an engine takes. Larger limits need more memory for activations, not for weights.

max_seq_len     prompt plus generated tokens of one request. A model with P positions allows P + 1: the last token \
generated is never read.
max_input_len   prompt tokens of one request
max_batch_size  requests that run at once; further ones wait
max_num_tokens  tokens computed in one step: one for each request that decodes, the rest for prompts. Longer prompts \
are cut into chunks. Fewer tokens make a steadier TPOT and a longer TTFT.

Limits that you do not give are fitted to the model, and the result line says which. Limits that you give are kept, or \
refused with exit code 2. `ingot serve` and `ModelRunner.from_dir` can \
lower max_batch_size and max_num_tokens, never raise them."""


def _metrics() -> str:
    return """\
TTFT      time to first token: from the request to its first token
TPOT      time per output token: (last token - first token) / (tokens - 1)
ITL       inter-token latency: every single gap between two tokens
good      a request that keeps both limits: TTFT <= --ttft_ms and TPOT <= --tpot_ms
goodput   the highest rate of arrivals, in requests per second, at which 90 % of the requests are good. \
`ingot bench serve --offline` searches for it. `ingot bench serve --url` prints the highest of your rates that \
reaches it.
of limit  how near an op comes to what this machine allows: the time that its bytes or operations need at the \
measured speed of memory or arithmetic, over the time that it took"""


def _families() -> str:
    return f"""\
`model_type` in a model's config.json names its family. ingot converts these:

{", ".join(family_names())}

These take images too, and ingot converts their text model: {", ".join(WRAPPERS)}

A new family is one file, convert/families/<model_type>.py.
`ingot convert` reads config.json first: download that file alone to learn whether a model is supported."""


def _trtllm() -> str:
    rows = [f"--{each.name}: {each.fate}; {each.way}" for each in SPELLINGS]
    rows += [f"--{name}: refused; {way}" for name, way in ABSENT.items()]
    return "Options of trtllm-build and convert_checkpoint.py, and what ingot does with them.\n\n" + "\n".join(rows)


def _flags(program: str, rows: Sequence[Flag]) -> str:
    lines = [f"{', '.join(row.flags)}: {row.hint()}" for row in rows]
    return f"Flags of {program}, and what to use in ingot.\n\n" + "\n".join(lines)


TOPICS = {
    "exit_codes": Topic(summary="What each exit code means.", text=_exit_codes),
    "families": Topic(summary="Models that ingot converts.", text=_families),
    "limits": Topic(summary="max_seq_len, max_num_tokens and the others.", text=_limits),
    "llama_cpp": Topic(summary="Flags of llama.cpp.", text=lambda: _flags("llama.cpp", LLAMA_CPP)),
    "memory": Topic(summary="What takes memory, and how to cap it.", text=_memory),
    "metrics": Topic(summary="TTFT, TPOT, ITL, goodput.", text=_metrics),
    "precisions": Topic(summary="bf16, w8, w4g128 and the others.", text=_precisions),
    "targets": Topic(summary="Kinds of machine that an engine is built for.", text=_targets),
    "trtllm": Topic(summary="Options of trtllm-build and convert_checkpoint.py.", text=_trtllm),
    "vllm": Topic(summary="Flags of vllm serve.", text=lambda: _flags("vLLM", VLLM)),
}
