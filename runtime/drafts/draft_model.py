"""Drafts from a smaller model of the same vocabulary, which computes a few tokens ahead of the large one.

    request       ... t6 t7          known tokens, of which the last drafts were right up to t6
    draft model   ... t6 │ t7        first its own cache catches up; the draw behind t7 is the first draft
                         │ d1 d2     then each further draft is a step, all of them in one call of its session

It draws with the request's temperature, seed and penalties. Draw n takes the n-th random number there and here: so the
two models draw the same token from distributions that are alike, and sampled drafts are right about as often as greedy
ones.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.engine import is_engine, read_manifest
from ingot.errors import UsageError
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.block_table import BlockTable
from ingot.runtime.drafts.row_times import RowTimes
from ingot.runtime.request import Request
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.runtime.step_batch import stack_tables
from ingot.step_io import LAST_DRAWN, Ahead, Int32, SequenceRules, StepBatch, StepResult

_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Held:
    """How far the draft model has come with a request.

    slot    where its session holds the sequence
    known   tokens of the request when it drafted last: they are in the cache
    drafts  what it drafted behind them; all but the last are in the cache, too
    """

    slot: int
    blocks: BlockTable
    known: int = 0
    drafts: Int32 = dataclasses.field(default_factory=lambda: _NOTHING)

    def computed(self, tokens: Int32) -> int:
        """How many of the tokens of the request, int32 [n], are in the cache; at most n - 1."""
        following = tokens[self.known : len(tokens) - 1]
        same = self.drafts[: min(len(self.drafts) - 1, len(following))] if len(self.drafts) else _NOTHING
        wrong = np.flatnonzero(same != following[: len(same)])
        right = int(wrong[0]) if len(wrong) else len(same)
        return min(self.known + right, len(tokens) - 1)


class DraftModel:
    """The drafter that is a model. It owns the engine: `close` closes it."""

    def __init__(self, loaded: LoadedEngine, vocab_size: int) -> None:
        """vocab_size: of the large model."""
        plan = loaded.engine.plan
        self._engine, self._session, self._limits = loaded.engine, loaded.session, loaded.limits
        self._vocab_size, self._own_vocab_size = vocab_size, plan.vocab_size
        self._blocks = BlockManager(
            loaded.session.num_blocks,
            plan.tokens_per_block,
            windows=[group.window for group in plan.caches],
            prefix_cache=False,
        )
        self._free = list(range(loaded.limits.max_batch_size))
        self._held: dict[Request, _Held] = {}
        self._times = RowTimes()
        self._never = np.zeros(1, np.int32)

    def match(self, request: Request, most: int) -> tuple[int, int]:
        """See Drafter. All drafts of this model rest on as much; not even one where it has no room for the request."""
        count = min(most, self._limits.max_seq_len - request.num_tokens)
        tokens = request.tokens[: request.num_tokens]
        if count < 1 or (self._own_vocab_size < self._vocab_size and int(tokens.max()) >= self._own_vocab_size):
            return 0, 0
        held = self._held.get(request)
        if held is None:
            if not self._free:
                return 0, 0
            held = self._held[request] = _Held(slot=self._free.pop(), blocks=BlockTable())
        if not self._blocks.reserve([(held.blocks, request.num_tokens + count - 1)]):
            self.forget(request)  # others may have its blocks; it begins again when there are enough
            return 0, 0
        return count, 1

    def seconds(self, requests: int, depth: int) -> float:
        """See Drafter."""
        return depth * self._times.predict(requests) if self._times.knows(requests) else 0.0

    def make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        """See Drafter."""
        begin, goes_on = time.perf_counter(), all(self._held[request].known for request in counts)
        drafts = {request: [token] for request, token in self._catch_up(list(counts)).items()}
        while going := [
            request for request in counts if len(drafts[request]) < counts[request] and drafts[request][-1] >= 0
        ]:
            depth = min(counts[request] - len(drafts[request]) for request in going)
            for request, tokens in zip(going, self._draw_on(going, drafts, depth), strict=True):
                drafts[request] += tokens
        made: dict[Request, Int32] = {}
        for request, tokens in drafts.items():
            held = self._held[request]
            held.known, held.drafts = request.num_tokens, np.array(tokens, np.int32)
            self._blocks.advance(held.blocks, request.tokens, request.num_tokens - 1)
            made[request] = _valid(held.drafts, self._vocab_size)
        if counts and goes_on:  # a prompt takes other times
            self._times.observe(len(counts), (time.perf_counter() - begin) / max(counts.values()))
        return made

    def forget(self, request: Request) -> None:
        """See Drafter."""
        held = self._held.pop(request, None)
        if held is not None:
            self._session.end(held.slot)
            self._blocks.release(held.blocks)
            self._free.append(held.slot)

    def close(self) -> None:
        """See Drafter."""
        self._held.clear()
        self._session.close()
        self._engine.close()

    def _catch_up(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Compute the known tokens of each that are not in the cache, in as many steps as that takes; first drafts."""
        computed: dict[Request, int] = {}
        for request in requests:
            held, tokens = self._held[request], request.tokens[: request.num_tokens]
            computed[request] = held.computed(tokens)
            self._session.start(held.slot, _draft_rules(request), tokens, request.num_prompt)
        first: dict[Request, int] = {}
        while left := [request for request in requests if request not in first]:
            room, chunks = self._limits.max_num_tokens, dict[Request, int]()
            for request in left[: self._limits.max_logit_rows]:
                if count := min(request.num_tokens - computed[request], room):
                    chunks[request] = count
                    room -= count
            drawing = [request for request, count in chunks.items() if computed[request] + count == request.num_tokens]
            result = self._run(chunks, computed, drawing)
            first |= dict(zip(drawing, result.ids[-1].tolist(), strict=True))
            for request, count in chunks.items():
                computed[request] += count
        return first

    def _run(
        self, chunks: Mapping[Request, int], computed: Mapping[Request, int], drawing: Sequence[Request]
    ) -> StepResult:
        """One step of known tokens, at the end of which some draw."""
        begins = [(request, computed[request]) for request in chunks]
        ends = np.cumsum(list(chunks.values()), dtype=np.int32)
        rows = [end - 1 for request, end in zip(chunks, ends.tolist(), strict=True) if request in drawing]
        return self._session.run(
            StepBatch(
                ids=np.concatenate([request.tokens[begin : begin + chunks[request]] for request, begin in begins]),
                query_starts=np.concatenate([[0], ends]).astype(np.int32),
                past_lengths=np.array([begin for _, begin in begins], np.int32),
                block_tables=self._tables(list(chunks)),
                logit_rows=np.array(rows, np.int32),
                slots=np.array([self._held[request].slot for request in chunks], np.int32),
                draws=np.arange(len(rows), dtype=np.int32),
            )
        )

    def _draw_on(
        self, requests: Sequence[Request], drafts: Mapping[Request, Sequence[int]], depth: int
    ) -> list[list[int]]:
        """`depth` further drafts of each, each behind what was drawn before; fewer where one of them fails."""
        count, found = len(requests), list[Int32]()
        past = np.array([request.num_tokens + len(drafts[request]) - 1 for request in requests], np.int32)
        batch = StepBatch(
            ids=np.full(count, LAST_DRAWN, np.int32),
            query_starts=np.arange(count + 1, dtype=np.int32),
            past_lengths=past,
            block_tables=self._tables(requests),
            logit_rows=np.arange(count, dtype=np.int32),
            slots=np.array([self._held[request].slot for request in requests], np.int32),
            draws=np.arange(count, dtype=np.int32),
        )
        steps = 0
        while steps < depth:
            most = min(depth - steps, self._session.most_steps)
            ahead = None if most == 1 else Ahead(most_steps=most, seconds=math.inf, stop=self._never)
            result = self._session.run(dataclasses.replace(batch, past_lengths=past + np.int32(steps)), ahead)
            found.append(result.ids)
            steps += len(result.ids)
            if result.ends.any():
                break
        tokens: list[list[int]] = np.concatenate(found).T.tolist()
        return tokens

    def _tables(self, requests: Sequence[Request]) -> Int32:
        return stack_tables([self._held[request].blocks.ids for request in requests])


def _draft_rules(request: Request) -> SequenceRules:
    """What bears on the likelihood of tokens; drafts behind an end are of no use, and do no harm."""
    rules = request.rules
    return SequenceRules(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=rules.min_p,
        seed=request.seed,
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        log_prob=False,
    )


def _valid(drafts: Int32, vocab_size: int) -> Int32:
    """The drafts before the first that the large model does not know. -1 is none: the logits were no numbers."""
    wrong = np.flatnonzero((drafts < 0) | (drafts >= vocab_size))
    return drafts[: wrong[0]] if len(wrong) else drafts


def open_draft_model(directory: Path, config: RuntimeConfig, vocab_size: int) -> DraftModel:
    """An engine as a draft model, on the threads and within the instruction set of `config`. Raises UsageError, and
    what `load_engine` raises."""
    where = str(directory)
    if not is_engine(directory):
        raise UsageError(
            "speculative_config: there is no draft model",
            where=where,
            expected="an Engine",
            hint='build one with ingot build --draft_dir, or name an Engine: {"method": "draft_model", "model": DIR}',
        )
    if (ranks := read_manifest(directory).ranks) > 1:
        raise UsageError(
            "speculative_config: a draft model has one rank",
            where=where,
            got=f"{ranks} ranks",
            hint="build it with one",
        )
    loaded = load_engine(directory, RuntimeConfig(threads=config.threads, isa=config.isa, use_mmap=config.use_mmap))
    if any(group.state for group in loaded.engine.plan.caches):
        loaded.session.close()
        loaded.engine.close()
        raise UsageError(
            "speculative_config: the draft model keeps states, which cannot go back behind a wrong draft",
            where=where,
            hint="take a draft model without states",
        )
    return DraftModel(loaded, vocab_size)
