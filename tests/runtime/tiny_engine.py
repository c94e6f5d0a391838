"""The tiny model as an engine directory, and as a loaded engine with any session."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import Policy, RuntimeConfig
from ingot.engine import Engine
from ingot.engine_writer import RankFile, write_engine
from ingot.manifest import Manifest
from ingot.plan import Limits, Plan
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.op import KvCache
from ingot.plugins.ref.session import RefSession
from ingot.plugins.target import SessionOptions, Target
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.executor import Executor
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.scheduler import Scheduler, TpotBudget
from ingot.runtime.session import LoadedEngine
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Session, StepBatch, StepResult
from tests.runtime.tiny_plan import TinyModel
from tests.runtime.wrapped_session import WrappedSession


def make_manifest(limits: Limits, target: str = "ref", eos_ids: tuple[int, ...] = ()) -> Manifest:
    return Manifest(
        ingot_version="0.1.0",
        model={"model_type": "tiny"},
        target=target,
        precision="f32",
        limits=limits,
        capabilities=(),
        ranks=1,
        eos_ids=eos_ids,
        bos_id=1,
        pad_id=None,
        parts=(),
    )


def write_tiny(directory: Path, model: TinyModel, target: str = "ref") -> Path:
    """A real engine directory."""
    directory.mkdir()
    manifest = make_manifest(model.plan.limits, target)
    content = RankFile(plans={target: model.plan}, blocks=[(0, memoryview(model.weights.tobytes()))])
    write_engine(directory, manifest, [content])
    return directory


def ref_session(model: TinyModel, num_blocks: int) -> RefSession:
    return RefSession(model.plan, model.weights, SessionOptions(num_blocks=model.plan.in_each(num_blocks)))


class PoisonedSession(WrappedSession):
    """A session in which every slot without an owner, and every slot of a block that its owner has not begun to write,
    holds NaN. `blocks`: the block manager of its runner; cached blocks keep their contents."""

    def __init__(self, inner: Session, plan: Plan) -> None:
        super().__init__(inner)
        self._size, self._caches = plan.tokens_per_block, plan.caches
        self.blocks: BlockManager | None = None
        self._poisoned: dict[int, set[int]] = {}  # of each cache group

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        assert self.blocks is not None
        for group, (pool, tables) in enumerate(zip(self.blocks.pools, batch.block_tables, strict=True)):
            unwritten = set(pool.free_blocks())
            for past, table in zip(batch.past_lengths.tolist(), tables.tolist(), strict=True):
                unwritten |= {block for block in table[-(-past // self._size) :] if block >= 0}
            for block in unwritten - self._poisoned.get(group, set()):
                self._poison(group, block)
            self._poisoned[group] = set(pool.free_blocks())
        return super().run(batch, ahead)

    def _poison(self, group: int, block: int) -> None:
        if isinstance(self._inner, RefSession):
            pool = self._inner.kv[group]
            for numbers in (
                (pool.keys[:, block], pool.values[:, block])
                if isinstance(pool, KvCache)
                else pool.numbers[block : block + 1]
            ):
                numbers[...] = np.nan
            return
        assert isinstance(self._inner, CpuSession)
        parts = (False,) if self._caches[group].state else (False, True)
        for layer, values in itertools.product(self._caches[group].layers, parts):
            size = len(self._inner.native.read_kv(layer, block, values))
            self._inner.native.write_kv(layer, block, values, np.full(size // 4, np.nan, np.float32).tobytes())


def open_session(model: TinyModel, target: Target, num_blocks: int | tuple[int, ...], threads: int = 1) -> Session:
    """num_blocks: of each cache group, or in all alike."""
    pools = model.plan.in_each(num_blocks) if isinstance(num_blocks, int) else num_blocks
    return target.open_session(model.plan, model.weights, SessionOptions(num_blocks=pools, threads=threads))


def poisoned_runner(
    model: TinyModel,
    target: Target,
    num_blocks: int | tuple[int, ...],
    limits: Limits | None = None,
    config: RuntimeConfig | None = None,
    seed: int = 0,
) -> ModelRunner:
    """Blocks handed out in random order, NaN in every slot that nobody owns or has written yet. Odd seeds have two
    threads."""
    session = PoisonedSession(open_session(model, target, num_blocks, 1 + seed % 2), model.plan)
    runner = make_runner(model, session, limits, config, shuffle=random.Random(seed))
    session.blocks = runner.blocks
    return runner


def make_runner(
    model: TinyModel,
    session: Session,
    limits: Limits | None = None,
    config: RuntimeConfig | None = None,
    eos_ids: tuple[int, ...] = (),
    shuffle: random.Random | None = None,
) -> ModelRunner:
    """A ModelRunner on any session."""
    limits = limits or model.plan.limits
    engine = Engine(
        directory=Path("tiny"), manifest=make_manifest(limits, eos_ids=eos_ids), plan=model.plan, weights=model.weights
    )
    return ModelRunner(LoadedEngine(engine=engine, session=session, limits=limits), config, shuffle=shuffle)


def make_loop(
    session: Session,
    limits: Limits,
    tokens_per_block: int,
    policy: Policy = Policy.MAX_UTILIZATION,
    shuffle: random.Random | None = None,
    prefix_cache: bool = True,
    mixed: bool = True,
    tpot_budget: TpotBudget | None = None,
    windows: Sequence[int] = (0,),
    strides: Sequence[int] | None = None,
) -> tuple[StepLoop, Scheduler, BlockManager]:
    """A StepLoop, whose steps the test runs, and its parts."""
    blocks = BlockManager(
        session.num_blocks,
        tokens_per_block,
        windows=windows,
        strides=strides,
        prefix_cache=prefix_cache,
        shuffle=shuffle,
    )
    scheduler = Scheduler(limits, blocks, policy, mixed=mixed, tpot_budget=tpot_budget)
    return StepLoop(session, scheduler, blocks), scheduler, blocks


def make_executor(session: Session, limits: Limits, tokens_per_block: int) -> Executor:
    """A StepLoop on a thread of its own."""
    blocks = BlockManager(session.num_blocks, tokens_per_block)
    return Executor(session, Scheduler(limits, blocks, Policy.MAX_UTILIZATION), blocks)
