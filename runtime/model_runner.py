"""`ModelRunner`: token ids in, token ids out, with TensorRT-LLM's names. Needs numpy beside ingot's own modules."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ingot.configs.runtime import Policy, RuntimeConfig, read_path, runtime_config
from ingot.configs.sampling import SamplingParams, check_flag
from ingot.configs.unknown import parameters, refuse_unknown
from ingot.engine import Engine
from ingot.errors import IngotError, RequestError, UsageError
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.drafts.drafting import drafting_for
from ingot.runtime.executor import Executor
from ingot.runtime.guided.guides import Guides
from ingot.runtime.kv_transfer import BlockTransfer
from ingot.runtime.memory import snapshot_stride
from ingot.runtime.outlet import Outlet, StreamDelta
from ingot.runtime.outputs import Outputs, Wanted
from ingot.runtime.owned import Owned
from ingot.runtime.reports import Stats
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler, TpotBudget
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.runtime.step_times import measure_step_times
from ingot.runtime.validation import (
    Arguments,
    ModelInfo,
    make_requests,
    params_per_prompt,
    read_end_ids,
    read_pad_id,
    read_priority,
    read_prompts,
    read_words,
)
from ingot.step_io import Int32

_DEFAULT_NEW_TOKENS = 20

_OPENING_WAYS = {
    "lora_dir": "leave it out: adapters do not exist in this version",
    "lora_ckpt_source": "leave it out: adapters do not exist in this version",
    "max_output_len": "generate(max_new_tokens=...); max_seq_len counts prompt and new tokens",
    "max_input_len": "leave it out: longer prompts than the engine's are refused, those below are taken",
    "max_beam_width": "leave it out: ingot has no beam search",
    "kv_cache_free_gpu_memory_fraction": 'say kv_cache_memory="4GiB"',
    "free_gpu_memory_fraction": 'say kv_cache_memory="4GiB"',
    "kv_cache_enable_block_reuse": "say enable_prefix_cache",
    "max_tokens_in_paged_kv_cache": 'say kv_cache_memory="4GiB"',
    "gpu_memory_utilization": 'say kv_cache_memory="4GiB"',
    "max_model_len": "say max_seq_len",
    "max_num_seqs": "say max_batch_size",
    "max_num_batched_tokens": "say max_num_tokens",
    "tensor_parallel_size": "leave it out: ranks are decided at build",
    "debug_mode": "leave it out; `ingot verify --against` compares the output of every kernel call",
    "stream": "leave it out: the runner has its own",
}
_WAYS = {
    "length_penalty": "leave it out: beam search, which it is for, does not exist yet",
    "early_stopping": "leave it out: beam search, which it is for, does not exist yet",
    "beam_width": "leave it out: ingot has no beam search",
    "lora_uids": "leave it out: adapters do not exist in this version",
    "prompt_table": "leave it out: the engine reads token ids only",
    "prompt_tasks": "leave it out: the engine reads token ids only",
    "encoder_input_ids": "leave it out: the engine has a decoder only",
    "input_ids": "say batch_input_ids",
    "max_length": "max_new_tokens counts the new tokens alone",
    "max_tokens": "say max_new_tokens",
    "do_sample": "leave it out: temperature, top_k or top_p samples, without them generate is greedy",
    "eos_token_id": "say end_id",
    "pad_token_id": "say pad_id",
    "seed": "say random_seed",
    "output_sequence_lengths": "leave it out: return_dict=True has them",
    "min_p": "sampling_config=SamplingParams(min_p=...)",
    "logit_bias": "sampling_config=SamplingParams(logit_bias=...)",
    "logits_processor": "sampling_config=SamplingParams(logits_processors=[...])",
    "logits_processors": "sampling_config=SamplingParams(logits_processors=[...])",
    "stopping_criteria": "stop_words_list or end_id ends a request",
    "streamer": "say streaming=True",
}

WordsList = Sequence[Sequence[Sequence[int]] | None]
"""Per prompt a list of token sequences."""


class ModelRunner(Owned):
    """An engine on this machine. Thread-safe: calls of several threads share every step.

    with ModelRunner.from_dir("engine") as runner:
        ids = runner.generate([[1, 5, 9], [1, 7]], max_new_tokens=100)
    """

    def __init__(
        self, loaded: LoadedEngine, config: RuntimeConfig | None = None, *, shuffle: random.Random | None = None
    ) -> None:
        """config: what it says about scheduling. shuffle: hand out KV blocks in random order; for tests."""
        super().__init__()
        if not isinstance(loaded, LoadedEngine):
            raise UsageError(
                "ModelRunner(...) takes a loaded engine",
                got=repr(loaded)[:100],
                hint="ModelRunner.from_dir opens an engine directory",
            )
        config = config or RuntimeConfig()
        manifest, plan = loaded.engine.manifest, loaded.engine.plan
        self.engine: Engine = loaded.engine
        self.model_info = ModelInfo(
            vocab_size=plan.vocab_size,
            limits=loaded.limits,
            max_positions=plan.max_positions,
            end_ids=frozenset(manifest.eos_ids),
            pad_id=0 if manifest.pad_id is None else manifest.pad_id,
        )
        self.guides = Guides(loaded.engine.directory, self.model_info.end_ids)
        self.blocks = BlockManager(
            loaded.session.num_blocks,
            plan.tokens_per_block,
            windows=[group.window for group in plan.caches],
            strides=[snapshot_stride(plan.caches, group) for group in plan.caches],
            prefix_cache=config.enable_prefix_cache,
            shuffle=shuffle,
        )
        tpot_budget = None
        if config.tpot_target is not None:
            times = measure_step_times(loaded.session, self.blocks, loaded.limits, config.tpot_target)
            tpot_budget = TpotBudget(times=times, tpot_target=config.tpot_target)
        scheduler = Scheduler(
            loaded.limits,
            self.blocks,
            config.policy,
            mixed=config.enable_chunked_prefill,
            prefill_chunk=loaded.prefill_chunk,
            tpot_budget=tpot_budget,
        )
        self.executor = Executor(loaded.session, scheduler, self.blocks, drafting_for(loaded, config, self.blocks))
        self._session = loaded.session

    def block_transfer(self) -> BlockTransfer:
        """For servers that compute prompts for others. Raises UsageError where blocks cannot leave the engine."""
        return BlockTransfer(self.executor, self._session, self.blocks, self.engine.manifest.target)

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        rank: int = 0,
        threads: int | None = None,
        isa: str | None = None,
        kv_cache_memory: int | str | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        enable_prefix_cache: bool = True,
        policy: str | Policy = Policy.MAX_UTILIZATION,
        enable_chunked_prefill: bool = True,
        tpot_target: float | None = None,
        max_seq_len: int | None = None,
        target: str | None = None,
        use_mmap: bool = False,
        rank_timeout: float = 30.0,
        collectives: str = "auto",
        speculative_config: object = None,
        **others: object,
    ) -> "ModelRunner":
        """Open an engine directory.

        rank                    which rank file
        threads                 None: every core of this process
        isa                     cap on what this machine claims: "avx2", "avxvnni", "avx512", "avx512bf16" or "amx"
        target                  of an engine with several: which one to run, or a family such as "cpu"; None: what fits
        kv_cache_memory         bytes or e.g. "2GiB"; None: min(max_batch_size x max_seq_len tokens, 40 % of what is
                                free)
        max_batch_size          requests running at once, at most the engine's
        max_num_tokens          tokens per step, at most the engine's; longer prompts come in chunks. None: the
                                engine's; on CPUs, of prompts beside decode rows no more than 512
        max_seq_len             tokens of a request, prompt included; at most the engine's
        enable_prefix_cache     requests whose tokens begin alike share the blocks of that head and compute it once
        policy                  "max_utilization" (preempts a request when blocks run out) or "guaranteed_no_evict"
                                (starts a request only when its whole length has room)
        enable_chunked_prefill  False: a step carries either whole prompts or decode rows, never both
        tpot_target             milliseconds that a step with decode rows should take at most: bounds the prompt tokens
                                beside them, by step times measured here and corrected while running
        use_mmap                True: weights are used where the engine's file is mapped, which processes share; False:
                                on CPUs from a copy in 2 MiB pages, faster to read, where there is memory for it
        rank_timeout            of an engine of several ranks: seconds that the processes of the others may be late,
                                before all of them end
        collectives             where these meet: "shm", in the memory of one machine; "mpi"; "auto": shm if it can be
        speculative_config      {"method": "ngram"}: steps also compute drafts, see docs/how-to/speculation.md

        An engine of several ranks needs a process for each, which MPI starts. It opens in the first; in the others
        this computes what the first one needs, and raises SystemExit at the end.
        Raises EngineError, TargetError, UsageError, CapacityError or RankError, each in words.
        """
        refuse_unknown("from_dir", others, parameters(cls.from_dir), _OPENING_WAYS, UsageError)
        config = runtime_config(
            rank=rank,
            threads=threads,
            isa=isa,
            kv_cache_memory=kv_cache_memory,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            enable_prefix_cache=enable_prefix_cache,
            policy=policy,
            enable_chunked_prefill=enable_chunked_prefill,
            tpot_target=tpot_target,
            target=target,
            use_mmap=use_mmap,
            rank_timeout=rank_timeout,
            collectives=collectives,
            speculative_config=speculative_config,
        )
        return cls(load_engine(read_path("engine_dir", engine_dir), config), config)

    def generate(
        self,
        batch_input_ids: object,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        end_id: int | Sequence[int] | None = None,
        pad_id: int | None = None,
        random_seed: int | Sequence[int] | None = None,
        num_return_sequences: int | None = None,
        stop_words_list: WordsList | None = None,
        bad_words_list: WordsList | None = None,
        min_length: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        sampling_config: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        streaming: bool = False,
        return_dict: bool = False,
        output_log_probs: bool = False,
        output_cum_log_probs: bool = False,
        output_generation_logits: bool = False,
        output_context_logits: bool = False,
        **others: object,
    ) -> Any:
        """Continue each prompt of `batch_input_ids` (lists, numpy or torch arrays of token ids).

        Greedy unless temperature, top_k or top_p is given. Every argument: docs/sampling.md.
        Returns int32 [batch, num_return_sequences, longest]: prompt, generated tokens (an end token included), pad_id;
        without any prompt [0, num_return_sequences, 0].
        With return_dict a dictionary: output_ids, sequence_lengths, finish_reasons (None while running), and where
        asked log_probs, cum_log_probs, generation_logits (zeros after the end), context_logits.
        Raises RequestError before anything runs if any prompt or argument is wrong, and if a request fails or somebody
        else ends it, after a stream has given all that came before.
        """
        _refuse(others)
        check_flag("streaming", streaming)
        prompts = read_prompts(batch_input_ids, self.model_info.vocab_size)
        own = Arguments(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            random_seed=random_seed,
            num_return_sequences=num_return_sequences,
            min_length=min_length,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        params = params_per_prompt(len(prompts), sampling_config, own)
        wanted = Wanted(
            as_dict=return_dict,
            log_probs=output_log_probs,
            cum_log_probs=output_cum_log_probs,
            generation_logits=output_generation_logits,
            context_logits=output_context_logits,
            logprobs=any(p.logprobs is not None for p in params),
            prompt_logprobs=any(p.prompt_logprobs is not None for p in params),
        )
        words, order = (stop_words_list, bad_words_list), read_priority(priority, cache_salt)
        groups = self._requests(prompts, params, read_end_ids(end_id, self.model_info), words, wanted, order)
        pad = self.model_info.pad_id if pad_id is None else read_pad_id(pad_id)
        n, vocab = params[0].n if params else num_return_sequences or 1, self.model_info.vocab_size
        outputs = Outputs(groups=groups, num_return_sequences=n, wanted=wanted, pad_id=pad, vocab_size=vocab)
        return self._stream(outputs) if streaming else self._run(outputs)

    def stats(self) -> Stats:
        """Blocks total, used and cached; requests running and waiting; preemptions; prefix_hit_tokens; see `Stats`."""
        return self.executor.stats()

    def step_log(self) -> list[list[int]]:
        """[prefill tokens, decode rows] of each step so far (the most recent 100,000)."""
        return self.executor.step_log()

    def close(self) -> None:
        """Fail what runs and release the engine, after the step that runs. Closing twice is fine."""
        self.executor.close()
        self.engine.close()

    def __enter__(self) -> "ModelRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Sequence[Int32],
        params: Sequence[SamplingParams],
        end_ids: frozenset[int] | None,
        words: tuple[WordsList | None, WordsList | None],
        wanted: Wanted,
        order: tuple[int, str],
    ) -> list[list[Request]]:
        stop_words, bad_words = (
            read_words(name, given, len(prompts), self.model_info.vocab_size)
            for name, given in zip(("stop_words_list", "bad_words_list"), words, strict=True)
        )
        return [
            make_requests(
                prompt,
                params[index],
                self.model_info,
                where=f"prompt {index}",
                default_max_tokens=_DEFAULT_NEW_TOKENS,
                end_ids=end_ids,
                stop_words=stop_words[index],
                bad_words=bad_words[index],
                want_context_logits=wanted.context_logits,
                want_generation_logits=wanted.generation_logits,
                want_log_probs=wanted.log_probs or wanted.cum_log_probs,
                priority=order[0],
                cache_salt=order[1],
                guides=self.guides,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _run(self, outputs: Outputs) -> Any:
        self.executor.complete(outputs.requests)
        if (failure := _first_failure(outputs.requests)) is not None:
            raise failure
        return outputs.collect()

    def _stream(self, outputs: Outputs) -> Iterator[Any]:
        self.executor.require_ready()
        outlet, shown = Outlet(), dict.fromkeys(outputs.requests, 0)
        left = len(shown)
        try:
            self.executor.add(outputs.requests, outlet)
            while left:
                news = outlet.get()
                ended = [progress.request for progress in news if progress.ended]
                failure = _first_failure(ended)
                for moved in _steps_of(news, shown):
                    if moved or failure is None:  # what came before a failure is given out before it is raised
                        yield outputs.collect(list(shown.values()))
                if failure is not None:
                    raise failure
                left -= len(ended)
        finally:
            self.executor.abort(outputs.requests)


def _steps_of(news: StreamDelta, shown: dict[Request, int]) -> Iterator[bool]:
    """Move `shown` forward, a step at a time; whether the step brought a token. Steps of one crossing brought each of
    its requests one token per step, up to the end of the crossing or of the request. An end without a token is a step.
    """
    counts = [num_generated - shown[request] for request, num_generated, _ in news]
    if max(counts) <= 1:
        shown.update([(request, num_generated) for request, num_generated, _ in news])
        yield max(counts) == 1
        return
    for step in range(max(counts)):
        for progress, count in zip(news, counts, strict=True):
            shown[progress.request] += step < count
        yield True


def _first_failure(requests: Sequence[Request]) -> IngotError | None:
    return next((request.failure for request in requests if request.failure is not None), None)


def _refuse(others: Mapping[str, object]) -> None:
    """Everything that is left: beams, which do not exist yet, and what nobody knows."""
    beams = others.get("num_beams")
    if beams not in (None, 1):
        raise RequestError(
            "num_beams is not supported: ingot has no beam search",
            expected="1",
            got=repr(beams)[:100],
            hint="num_return_sequences gives several samples of one prompt",
        )
    unknown = {name: value for name, value in others.items() if name != "num_beams"}
    refuse_unknown("generate", unknown, parameters(ModelRunner.generate), _WAYS, RequestError)
