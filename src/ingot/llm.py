"""`LLM`: an Engine, or a Hugging Face directory or GGUF file that becomes one first, behind vLLM's names."""

import dataclasses
import sys
from pathlib import Path

from ingot.configs.build import BuildConfig
from ingot.configs.runtime import Policy, read_path, runtime_config
from ingot.configs.unknown import parameters, refuse_unknown
from ingot.engine import is_engine
from ingot.engine_cache import cached_engine
from ingot.errors import MissingMethodError, UsageError
from ingot.plugins.cuda.gpu import find_gpus
from ingot.runtime.answers.answer_formats import check_formats
from ingot.runtime.llm import EngineLLM
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import load_engine
from ingot.runtime.tokenizer import Tokenizer

_NO_CODE = "leave it out: no code of a checkpoint ever runs"
_OWN_TOKENIZER = "leave it out: an engine has its own; give token ids for another one's"
_ADAPTERS = "leave it out: adapters do not exist in this version"
_LOCAL = "leave it out: model is a directory, and nothing is downloaded"
_WAYS = {
    "max_seq_len": "say max_model_len",
    "max_batch_size": "say max_num_seqs",
    "max_num_tokens": "say max_num_batched_tokens",
    "enable_prefix_cache": "say enable_prefix_caching",
    "engine_dir": "say model",
    "model_path": "say model",
    "dtype": 'say precision: "f32", "bf16", "w8", "w4g128", ...',
    "quantization": 'say precision: "w8", "w4g128", "w4g64" or "w4g32"',
    "device": 'say target: "cpu", "cuda/sm90", ...',
    "block_size": "leave it out, or build with: ingot build --tokens_per_block",
    "kv_cache_memory_bytes": "say kv_cache_memory",
    "swap_space": "leave it out: what is preempted is computed again",
    "cpu_offload_gb": "leave it out: weights lie in one memory",
    "seed": "SamplingParams(seed=...)",
    "pipeline_parallel_size": "leave it out: an engine gets its stages when it is built, see ingot build --pp_size",
    "data_parallel_size": "open one LLM per process",
    "enforce_eager": "leave it out: `ingot build` has compiled the engine",
    "max_seq_len_to_capture": "leave it out: the engine says which steps become CUDA graphs",
    "compilation_config": "leave it out: kernels are compiled before",
    "disable_custom_all_reduce": 'leave it out: collectives="mpi" of ModelRunner.from_dir',
    "trust_remote_code": _NO_CODE,
    "tokenizer": _OWN_TOKENIZER,
    "tokenizer_mode": _OWN_TOKENIZER,
    "tokenizer_revision": _OWN_TOKENIZER,
    "skip_tokenizer_init": "use ingot.runtime.ModelRunner, which has no tokenizer",
    "revision": _LOCAL,
    "hf_token": _LOCAL,
    "download_dir": "say cache_dir for built engines",
    "load_format": "leave it out: safetensors are read, and .bin files",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "guided_decoding_backend": "leave it out: SamplingParams(structured_outputs=...) says what form an answer has",
    "limit_mm_per_prompt": "leave it out: the engine reads text only",
    "disable_log_stats": "leave it out: LLM.stats() counts when it is asked",
    "scheduling_policy": "leave it out: ModelRunner.generate has priority",
    "enable_chunked_prefill": "leave it out, or use ModelRunner.from_dir, which has it",
    "tool_call_parser": "say tool_parser",
    "max_logprobs": "leave it out: SamplingParams(logprobs=...) takes any number",
    "override_generation_config": "SamplingParams says it",
    "generation_config": "leave it out: it applies in ingot run and ingot serve only",
    "runner": "leave it out: the engine generates text",
    "task": "leave it out: the engine generates text",
}
"""Arguments of other libraries' `LLM` → ingot's way."""

_NO_VECTORS = "models that return vectors or scores instead of text are not supported in this version"
_METHODS = {
    "beam_search": "beam search does not exist in this version; SamplingParams(n=...) draws several answers",
    "embed": _NO_VECTORS,
    "encode": _NO_VECTORS,
    "classify": _NO_VECTORS,
    "reward": _NO_VECTORS,
    "score": _NO_VECTORS + "; SamplingParams(prompt_logprobs=0) scores a text by its tokens",
    "sleep": "close() gives all memory back; open the engine again when it is needed",
    "wake_up": "open the engine again",
    "reset_prefix_cache": 'a prompt {"prompt": ..., "cache_salt": ...} keeps the prefixes of users apart',
    "start_profile": "ingot bench kernels times every op of an engine",
    "stop_profile": "ingot bench kernels times every op of an engine",
    "get_metrics": "LLM.stats() has the same figures",
}
"""Methods of other libraries' `LLM` → why there is none here, and ingot's way."""
_COUNTS = {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1}  # and the least that they may be


class LLM(EngineLLM):
    """Text or token ids in, text out.

    llm = LLM("engine")
    for r in llm.generate(["Once upon a time", [1, 403, 407]], SamplingParams(max_tokens=64, temperature=0)):
        print(r.outputs[0].text)
    async for r in llm.generate_async("Once", SamplingParams(max_tokens=64)): ...
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        precision: str = "auto",
        activations: str = "auto",
        kv_cache_dtype: str = "auto",
        target: str | None = None,
        cache_dir: str | Path | None = None,
        threads: int | None = None,
        isa: str | None = None,
        kv_cache_memory: int | str | None = None,
        policy: str | Policy = Policy.MAX_UTILIZATION,
        use_mmap: bool = False,
        speculative_config: object = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        **others: object,
    ) -> None:
        """Open an engine. model: an engine directory; or a Hugging Face directory or GGUF file, from which an engine is
        built into a cache the first time.

        max_model_len           tokens of a request, prompt included; for an engine at most its max_seq_len
        max_num_seqs            requests running at once; for an engine at most its max_batch_size
        max_num_batched_tokens  tokens per step; for an engine at most its max_num_tokens
        tensor_parallel_size    only 1: `ingot build --tp_size` builds engines of several ranks
        gpu_memory_utilization  refused: kv_cache_memory sets the size of the KV cache
        precision, activations, kv_cache_dtype  options of `ingot build`; refused if model is an engine
        target                  the target to build for ("cpu" unless given), or to run of an engine with several
        cache_dir               directory of built engines; None: ingot's folder in $XDG_CACHE_HOME or ~/.cache
        threads, isa, kv_cache_memory, policy, use_mmap, speculative_config
                                as in ModelRunner.from_dir
        tool_parser, reasoning_parser
                                formats in `chat`, by name, or "none"; None: those that the chat template shows
        others                  refused by name, with ingot's way if there is one

        Raises UsageError (arguments), EngineError (a damaged engine), TargetError (this machine cannot run it),
        CapacityError (memory), and what `convert` and `build` raise.
        """
        refuse_unknown("LLM", others, parameters(LLM), _WAYS, UsageError)
        _refuse(tensor_parallel_size, gpu_memory_utilization, max_model_len, max_num_seqs, max_num_batched_tokens)
        check_formats(tool_parser, reasoning_parser)
        directory = read_path("model", model)
        build = BuildConfig(
            target="cpu" if target is None else target,
            precision=precision,
            activations=activations,
            kv_cache_dtype=kv_cache_dtype,
            max_seq_len=max_model_len,
            max_batch_size=max_num_seqs,
            max_num_tokens=max_num_batched_tokens,
        )
        run = runtime_config(
            threads=threads,
            isa=isa,
            target=target,
            kv_cache_memory=kv_cache_memory,
            max_batch_size=max_num_seqs,
            max_num_tokens=max_num_batched_tokens,
            max_seq_len=max_model_len,
            enable_prefix_cache=enable_prefix_caching,
            policy=policy,
            use_mmap=use_mmap,
            speculative_config=speculative_config,
        )
        if is_engine(directory):
            if any(each != "auto" for each in (precision, activations, kv_cache_dtype)) or cache_dir is not None:
                raise UsageError(
                    "precision, activations, kv_cache_dtype and cache_dir have no effect on an Engine",
                    where=str(directory),
                    hint="leave them out, or give the Hugging Face directory or GGUF file",
                )
        else:
            cache = None if cache_dir is None else read_path("cache_dir", cache_dir)
            directory = cached_engine(directory, build, cache, _say)
            run = dataclasses.replace(run, target=None)  # of what was built, whatever fits
        tokenizer = Tokenizer.from_dir(directory)
        super().__init__(ModelRunner(load_engine(directory, run), run), tokenizer, tool_parser, reasoning_parser)

    def __getattr__(self, name: str) -> object:
        """Python asks here for what the class does not have."""
        if name in _METHODS:
            raise MissingMethodError(f"LLM has no method {name!r}", hint=_METHODS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _refuse(tensor_parallel_size: int, gpu_memory_utilization: float | None, *counts: int | None) -> None:
    """Under vLLM's names: those who pass on the counts have others."""
    if not isinstance(tensor_parallel_size, int) or tensor_parallel_size != 1:
        raise UsageError(
            "tensor_parallel_size is not supported: an engine gets its ranks when it is built",
            expected="1",
            got=f"{tensor_parallel_size!r}; this machine has {len(find_gpus().gpus)} NVIDIA GPUs that can be used",
            hint="leave tensor_parallel_size out; ingot build --tp_size makes an engine of several ranks",
        )
    if gpu_memory_utilization is not None:
        raise UsageError(
            "gpu_memory_utilization is not supported: the KV cache has a size, not a share of a GPU",
            got=repr(gpu_memory_utilization),
            hint='say how much memory the KV cache may take: kv_cache_memory="4GiB"',
        )
    for (name, least), value in zip(_COUNTS.items(), counts, strict=True):
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"{name} must be a whole number, at least {least}", got=repr(value))


def _say(line: str) -> None:
    print(f"ingot: {line}", file=sys.stderr, flush=True)
