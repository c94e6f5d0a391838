"""One rank of an engine of several, on a GPU of its own.

    rank 0   run ─▶ batch ─▶ shared memory or MPI ─▶ all ranks launch the same step, in which NCCL moves numbers
    rank 1.. follow ◀─────────┘                      rank 0 draws

Ranks meet in two communicators: those of a pipeline stage, and those at the same place of all stages. All ranks launch
the same calls of NCCL in the same order, since these follow from the plan and the batch alone.
"""

import atexit
import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ingot.errors import IngotError, RankError, RequestError
from ingot.plan import Plan
from ingot.plugins.cpu.ranks import open_group, rank_errors
from ingot.plugins.cuda.gpu import Gpu
from ingot.plugins.cuda.nccl import Communicator, Nccl, require_nccl
from ingot.plugins.cuda.rank_watch import RankWatch
from ingot.plugins.cuda.session import PlanOnGpu
from ingot.plugins.cuda.step_tables import Counts, check_batch
from ingot.plugins.cuda.work import Among, Exchange
from ingot.plugins.target import RankLink, SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult

_SIZES = 4  # numbers ahead of a batch's arrays
_CONNECTING = 600.0  # seconds that ranks may take to find each other
_LEAVING = 10.0  # seconds that the others may take to end, before their communicator is cut off
_LOOK = 0.05

Made = TypeVar("Made")


class CudaRankSession(PlanOnGpu):
    """Rank 0 is asked for steps, the others follow it."""

    def __init__(
        self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, gpu: Gpu, link: RankLink
    ) -> None:
        """Waits for the other ranks. Raises RankError, and as `PlanOnGpu`."""
        self._link, self._timeout = link, options.rank_timeout
        self._stage, self._stages = plan.stage
        self._places = link.count // self._stages
        self.place = link.rank % self._places
        self._announced: deque[StepBatch] = deque()
        self._communicators: dict[Among, Communicator] = {}
        self._left = False
        self._group = open_group(plan, link, options, moves=False)
        with contextlib.ExitStack() as opened:
            self._watch = opened.enter_context(contextlib.closing(RankWatch(self._group, options.rank_timeout)))
            super().__init__(plan, weights, options, gpu)
            opened.pop_all()
        atexit.register(self._leave)  # others would wait for a process that takes its time to end

    def _open(self, plan: Plan, weights: npt.NDArray[np.uint8], opened: contextlib.ExitStack) -> None:
        opened.callback(self._disconnect)  # graphs, which are loaded later, are destroyed before
        try:
            nccl = require_nccl()
            self._load(plan, weights, opened)
        except IngotError as error:
            self._link.exchange(str(error))  # none waits for this rank
            raise
        for rank, problem in enumerate(self._link.exchange("")):
            if problem:
                raise RankError(f"rank {rank} cannot load its part of the engine", got=problem)
        self._connect(nccl)
        self.device.watch = self._watch.require_all
        with self._watch.step():
            self._capture_decode()

    def _connect(self, nccl: Nccl) -> None:
        """A communicator's first rank names it."""
        leads = {
            Among.STAGE: self._places > 1 and self.place == 0,
            Among.PIPELINE: self._stages > 1 and self._stage == 0,
        }
        ids = self._link.exchange({among: nccl.new_id() for among, leading in leads.items() if leading})
        first, earliest = self._link.rank - self.place, (self._stages - 1) * self._places + self.place
        if self._places > 1:
            self._join(Among.STAGE, nccl, ids[first][Among.STAGE], self.place, self._places)
        if self._stages > 1:
            self._join(Among.PIPELINE, nccl, ids[earliest][Among.PIPELINE], self._stage, self._stages)

    def _join(self, among: Among, nccl: Nccl, unique_id: bytes, rank: int, count: int) -> None:
        def join() -> Communicator:
            self.device.enter()
            return Communicator(nccl, unique_id, rank, count, self.device.stream_address)

        made = self._while_all_are_here(join)
        self._communicators[among] = made
        self._watch.add(made)

    def _while_all_are_here(self, make: Callable[[], Made]) -> Made:
        """In another thread, because NCCL waits without end. Raises RankError where a rank is lost."""
        made: list[Made] = []
        errors: list[IngotError] = []

        def run() -> None:
            try:
                made.append(make())
            except IngotError as error:
                errors.append(error)

        thread, end = threading.Thread(target=run, daemon=True), time.monotonic() + _CONNECTING
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK)
            self.require_ranks()
            if time.monotonic() > end:
                raise RankError("the ranks have not found each other by NCCL", got=f"nothing in {_CONNECTING:g} s")
        if errors:
            raise self._watch.fail(f"rank {self._link.rank}: {errors[0]}") from errors[0]
        return made[0]

    def _disconnect(self) -> None:
        """Once all steps are done; where the group has failed, whatever is under way."""
        if self._group.failed:
            threads = self._watch.abort()
        else:  # each waits for the other ranks
            communicators = self._communicators.values()
            threads = [threading.Thread(target=each.close, daemon=True) for each in communicators]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(_LEAVING)
        self._communicators.clear()

    def _exchange(self, work: Exchange, counts: Counts) -> None:
        work.run(self._communicators[work.among], counts)

    # What rank 0 is asked for.

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence. Raises RequestError for rules or tokens that break the contract."""
        self._sampler.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._sampler.end(slot)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits, on the host."""
        return self._sampler.draw(slots, logits, raw)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step, with all ranks. Raises RequestError for a batch that breaks the contract, before anything is
        computed, and RankError."""
        return self._run(batch, self._launch)

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        outputs: dict[str, dict[str, Float32]] = {}
        result = self._run(batch, lambda complete: outputs.update(self._compute_tapped(complete, steps)))
        return result, outputs

    def _run(self, batch: StepBatch, compute: Callable[[StepBatch], None]) -> StepResult:
        batch = self._of_announced(batch) if self._announced else self._checked(batch)
        draws = self._sampler.of_step(batch)
        self._begin(batch)
        with self._watch.step():
            compute(batch)
            return self._sampler.finish(self._sampler.submit(batch, draws, self._logits_at))

    def _checked(self, batch: StepBatch) -> StepBatch:
        """With the tokens that it leaves to the session. Raises RequestError."""
        batch = self._sampler.complete(batch)
        check_batch(batch, self._plan, self.num_blocks)
        return batch

    def _of_announced(self, batch: StepBatch) -> StepBatch:
        """The batch with the tokens of the step that was announced first. Raises RequestError for another step."""
        known = self._announced[0]
        for name in ("query_starts", "past_lengths", "logit_rows", "block_tables"):
            if not np.array_equal(getattr(batch, name), getattr(known, name)):
                raise RequestError("steps run in the order in which they were announced", got=f"other {name}")
        return dataclasses.replace(batch, ids=known.ids)

    def _begin(self, batch: StepBatch) -> None:
        """Have all ranks begin it."""
        with rank_errors():
            if self._announced:
                self._announced.popleft()
            else:
                self._group.announce(_packed(batch))
            self._group.begin_step()

    @property
    def stages(self) -> int:
        """Pipeline stages, which may compute as many steps at once."""
        return self._stages

    def announce(self, batch: StepBatch) -> None:
        """See `PipelineSession`. Raises RequestError for a batch that breaks the contract, RankError."""
        if len(self._announced) == self._stages:
            raise RequestError("too many steps are under way", expected=f"at most {self._stages} announced ones")
        batch = self._checked(batch)
        with rank_errors():
            self._group.announce(_packed(batch))
        self._announced.append(batch)

    def settle(self) -> None:
        """See `PipelineSession`. Raises RankError."""
        while self._announced:
            batch = self._announced[0]
            self._begin(batch)
            self._compute(batch)

    # What the others do.

    def follow(self) -> None:
        """Compute the first rank's steps until it closes. Raises RankError."""
        while (batch := self._next()) is not None:
            self._compute(batch)

    def follow_tapped(self, steps: Sequence[str]) -> Mapping[str, Mapping[str, Float32]]:
        """Compute one step of the first rank's. Raises RankError."""
        batch = self._next()
        if batch is None:
            return {}
        with self._watch.step():
            outputs = self._compute_tapped(batch, steps)
            self.device.wait()
            return outputs

    def _next(self) -> StepBatch | None:
        with rank_errors():
            numbers = self._group.next_step()
        if numbers is None:
            return None
        try:
            batch = _unpacked(numbers, len(self._plan.caches))
            check_batch(batch, self._plan, self.num_blocks)
        except RequestError as error:
            raise self._watch.fail(f"rank {self._link.rank} refuses a step: {error}") from error
        return batch

    def _compute(self, batch: StepBatch) -> None:
        """A step without draws, to its end: so a stage is at most a step ahead of the next one."""
        with self._watch.step():
            self._launch(batch)
            self.device.wait()

    def _launch(self, batch: StepBatch) -> None:
        self.device.enter()
        counts, integers = self._tables[0].fill(batch, self._graphs.size(batch))
        self.device.send(self._tables_at, integers)
        self._graphs.run(counts, functools.partial(self._launch_all, counts))

    def require_ranks(self) -> None:
        """Raises RankError where a rank has ended or failed. From any thread."""
        self._watch.require_all()
        with rank_errors():
            if not self._left:
                self._group.require_all()

    def close(self) -> None:
        """The first rank's: the others stop following. Gives the GPU's memory back."""
        if self._left:
            return
        try:
            if not self._group.failed:
                self.settle()
                self._group.close()
        finally:
            self._left = True
            with contextlib.suppress(IngotError), self._watch.step():
                self.device.wait()  # a step that was interrupted may wait for ranks that are gone
            self._watch.close()
            atexit.unregister(self._leave)
            self.device.watch = None
            super().close()
        if not self._group.failed:
            self._link.leave()

    def _leave(self) -> None:
        with contextlib.suppress(IngotError):
            self.close()


def _packed(batch: StepBatch) -> Int32:
    """int32: four sizes, then the arrays that ranks need."""
    tables = batch.block_tables
    sizes = np.array([len(batch.ids), len(batch.past_lengths), len(batch.logit_rows), tables.shape[2]], np.int32)
    return np.concatenate(
        [sizes, batch.ids, batch.query_starts, batch.past_lengths, batch.logit_rows, tables.reshape(-1)], dtype=np.int32
    )


def _unpacked(numbers: Int32, groups: int) -> StepBatch:
    """groups: cache groups of the plan. Raises RequestError."""
    tokens, sequences, rows, width = numbers[:_SIZES].tolist() if len(numbers) >= _SIZES else (-1,) * _SIZES
    lengths = (_SIZES, tokens, sequences + 1, sequences, rows, groups * sequences * width)
    if min(lengths) < 0 or sum(lengths) != len(numbers):
        raise RequestError("the batch of a step is cut off", got=f"{len(numbers)} numbers")
    _, ids, query_starts, past_lengths, logit_rows, tables = np.split(numbers, np.cumsum(lengths)[:-1])
    return StepBatch(
        ids=ids,
        query_starts=query_starts,
        past_lengths=past_lengths,
        block_tables=tables.reshape(groups, sequences, width),
        logit_rows=logit_rows,
        slots=np.zeros(0, np.int32),
        draws=np.zeros(0, np.int32),
    )
