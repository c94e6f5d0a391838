"""Engine directory → target → Session, with every limit and the KV memory decided before anything is allocated."""

import contextlib
import dataclasses
import logging
import signal
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sizes import format_bytes
from ingot.engine import Engine, open_engine, read_manifest, read_plan
from ingot.errors import CapacityError, TargetError, UsageError
from ingot.plan import Limits, Plan
from ingot.plugins.cpu.native import crc32 as native_crc32
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.registry import fit_targets
from ingot.plugins.target import (
    JoinsRanks,
    NumaAware,
    RankLink,
    RankSession,
    RunsRanks,
    SessionOptions,
    Target,
    WithMemory,
)
from ingot.runtime.distributed import (
    find_link,
    find_places,
    local_ranks,
    require_link,
    share_cores,
    share_memory,
    start_ranks,
    together,
)
from ingot.runtime.memory import available_memory, fits_beside, kv_budget
from ingot.step_io import Session
from ingot.weights_memory import NumaPlacement

PREFILL_CHUNK = 512  # tokens: CPU kernels have their full speed with as many, and who decodes waits less

_LOG = logging.getLogger("ingot.runtime")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEngine:
    """limits: the engine's, lowered to what the runtime config asks for.

    prefill_chunk: tokens of prompts at most in a step with decode rows; None: as many as limits allow
    """

    engine: Engine
    session: Session
    limits: Limits
    prefill_chunk: int | None = None


def join_ranks(directory: Path | str, config: RuntimeConfig, *, drains: bool = False) -> None:
    """For commands, before they read or print anything. Where processes share the engine: start them, or, in those
    after the first, do their part and end. Returns in the process that the command is for.

    drains: the command ends in good manner after SIGUSR1, and the other processes with it

    Raises as `load_engine`.
    """
    ranks = read_manifest(directory).ranks
    # MPICH takes SIGUSR1 for itself when it starts: a signal that comes meanwhile waits for the handler.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        link = find_link()
        if drains and link is not None:  # the first process ends by it, until its server listens; the others go on
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if link.rank else signal.getsignal(signal.SIGTERM))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    if ranks == 1 and link is not None:
        raise UsageError(
            f"{link.count} processes are started for an engine of one rank",
            where=str(directory),
            hint="start one process, or build an engine with a larger --tp_size or --pp_size",
        )
    if ranks > 1 and isinstance(_choose_target(directory, config), JoinsRanks):
        if link is None:
            start_ranks(Path(directory), ranks, drains=drains)
        if link.rank > 0:
            load_engine(directory, config)


def load_engine(directory: Path | str, config: RuntimeConfig, link: RankLink | None = None) -> LoadedEngine:
    """Open and check an engine and load it on this machine: of several targets the one that fits best.

    Where processes share the engine, it returns in the first. The others compute their share until the first one's
    session is closed, then SystemExit ends them. link: to these processes; None: MPI has started them.

    Raises EngineError (damaged), TargetError (this machine cannot run it), UsageError (limits beyond the engine's,
    use_mmap of a file that anybody may write), CapacityError (memory), RankError (another rank's trouble).
    """
    manifest = read_manifest(directory)
    target = _choose_target(directory, config)
    _require_ranks(manifest.ranks, target, config, str(directory))
    if config.use_mmap:
        _require_lasting(Path(directory))
    if manifest.ranks > 1 and isinstance(target, JoinsRanks):
        return _load_rank(Path(directory), config, target, link or require_link(manifest.ranks, Path(directory)))
    crc32 = _crc32 if detect_isa() != "none" else None

    def placement(plan: Plan) -> NumaPlacement | None:
        return _numa_placement(plan, target, config)

    engine = open_engine(directory, rank=config.rank, crc32=crc32, target=target.name, placement=placement)
    limits = lowered(engine.plan.limits, config)
    on_device = target.kv_memory(engine.plan)
    available = available_memory() if on_device is None else on_device
    with contextlib.ExitStack() as further:
        ranks = [engine]
        for rank in range(1, manifest.ranks):
            ranks.append(further.enter_context(open_engine(directory, rank, crc32, target.name)))
        share = _share(config, len(ranks)), available // len(ranks)
        counts = [kv_budget(each.plan.caches, limits, *share).num_blocks for each in ranks]  # stages have other layers
        num_blocks = tuple(map(min, zip(*counts, strict=True)))
        options = SessionOptions(num_blocks=num_blocks, threads=config.threads, directory=Path(directory))
        session = _open_session(target, ranks, options)
    chunk = None if target.on_gpu or config.max_num_tokens is not None else PREFILL_CHUNK
    return LoadedEngine(engine=engine, session=session, limits=limits, prefill_chunk=chunk)


def _load_rank(directory: Path, config: RuntimeConfig, target: JoinsRanks, link: RankLink) -> LoadedEngine:
    """The share of one process. All of them have as many KV blocks as the one with the least memory."""
    places = find_places(directory, link)
    on_machine = local_ranks(places, link.rank)
    local = on_machine.index(link.rank), len(on_machine)
    here = len(on_machine)
    threads = config.threads if target.on_gpu else share_cores(places, link.rank, config.threads)
    opened: list[Engine] = []

    def placement(plan: Plan) -> NumaPlacement | None:
        return _numa_placement(plan, target, config, link.count, here)

    def open_own() -> tuple[int, ...]:
        opened.append(open_engine(directory, link.rank, _crc32, target.name, placement))
        plan = opened[0].plan
        memory, on_device = _share(config, link.count), target.rank_memory(plan, local)
        available = available_memory() // here if on_device is None else on_device
        return kv_budget(plan.caches, lowered(plan.limits, config), memory, available).num_blocks

    num_blocks = tuple(min(counts) for counts in zip(*together(link, open_own), strict=True))
    engine, timeout = opened[0], config.rank_timeout
    options = SessionOptions(
        num_blocks=num_blocks,
        threads=threads,
        directory=directory,
        rank_timeout=timeout,
        shared_memory=share_memory(places, config.collectives),
        local=local,
    )
    try:
        session = target.open_rank(engine.plan, engine.weights, options, link)
    except CapacityError as error:  # only this process says it
        error.where = f"rank {link.rank}" if error.where is None else f"rank {link.rank}: {error.where}"
        raise
    if link.rank > 0:
        _follow(session, engine)
    limits = lowered(engine.plan.limits, config)
    chunk = None if target.on_gpu or config.max_num_tokens is not None else PREFILL_CHUNK
    return LoadedEngine(engine=engine, session=session, limits=limits, prefill_chunk=chunk)


def _follow(session: RankSession, engine: Engine) -> NoReturn:
    with engine, contextlib.closing(session):
        session.follow()
    raise SystemExit(0)


def _choose_target(directory: Path | str, config: RuntimeConfig) -> Target:
    def plan(target: str) -> Plan:
        return read_plan(directory, target=target)

    targets = read_manifest(directory).targets
    return fit_targets(targets, where=str(directory), wanted=config.target, isa=config.isa, plan=plan).best()


def _share(config: RuntimeConfig, ranks: int) -> int | None:
    """One rank's part of the memory that was asked for."""
    return None if config.kv_cache_memory is None else config.kv_cache_memory // ranks


def _numa_placement(
    plan: Plan, target: Target, config: RuntimeConfig, ranks: int = 1, here: int = 1
) -> NumaPlacement | None:
    """Where to copy the weights, if anywhere. ranks: that share the KV cache; here: those on this machine.

    Raises CapacityError where there is no room for the KV cache even without a copy: no copy is missed then.
    """
    if config.use_mmap or not isinstance(target, NumaAware):
        return None
    limits, available, memory = lowered(plan.limits, config), available_memory() // here, _share(config, ranks)
    kv_budget(plan.caches, limits, memory, available)
    if not fits_beside(plan.weight_bytes, plan.caches, limits, memory, available):
        _LOG.warning(
            "weights are read from the mapped file, which is slower than a copy on each NUMA node: a copy needs %s "
            "beside the KV cache, %s are free; free memory, or lower --kv_cache_memory",
            format_bytes(plan.weight_bytes),
            format_bytes(available),
        )
        return None
    return target.placement(plan, config.threads)


def _require_lasting(directory: Path) -> None:
    """Where a mapped file gets shorter, the process that reads there is ended by the system (SIGBUS). Its owner and the
    group that it was given to are trusted not to do that; files that just anybody may write are not.
    """
    for path in sorted(directory.glob("rank*.engine")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & stat.S_IWOTH:
            raise UsageError(
                "use_mmap: anybody may write to the engine's file, and shortening it would end this process",
                where=str(path),
                expected="a file that its owner alone may write, or its group",
                got=f"mode {mode:04o}",
                hint=f"chmod o-w {path}, or leave use_mmap out: then the weights are copied",
            )


def _open_session(target: Target, ranks: Sequence[Engine], options: SessionOptions) -> Session:
    """A session for the engine's only rank, or for all of them in this process."""
    if len(ranks) == 1:
        return target.open_session(ranks[0].plan, ranks[0].weights, options)
    assert isinstance(target, RunsRanks), "all others are refused"
    return target.open_ranks([each.plan for each in ranks], [each.weights for each in ranks], options)


def _require_ranks(ranks: int, target: Target, config: RuntimeConfig, where: str) -> None:
    """An engine of several ranks is a part of a model in each file. Raises TargetError where nothing puts them
    together, UsageError where one of them is asked for."""
    if ranks == 1:
        return
    if isinstance(target, (RunsRanks, JoinsRanks)):
        if config.rank and isinstance(target, JoinsRanks):
            raise UsageError(
                f"rank {config.rank}: MPI says which of the {ranks} ranks a process computes",
                where=where,
                hint=f"leave rank out, and start the program with mpirun -n {ranks}",
            )
        if config.rank:
            raise UsageError(
                f"rank {config.rank}: {target.name} computes all {ranks} ranks of the engine in one process",
                where=where,
                hint="leave rank out",
            )
        return
    here = f"{target.devices()} that run {target.name}" if isinstance(target, WithMemory) else "no GPU in use"
    raise TargetError(
        "this machine cannot run the engine",
        where=where,
        expected=f"{ranks} ranks, a GPU for each",
        got=f"{here}; {target.name} runs engines of one rank",
        hint="build the engine with --tp_size 1 --pp_size 1",
    )


def _crc32(data: memoryview) -> int:
    """As zlib's, at memory speed: the checksums are what opening an engine costs."""
    return native_crc32(np.frombuffer(data, np.uint8))


def lowered(limits: Limits, config: RuntimeConfig) -> Limits:
    """`limits` with the config's max_batch_size, max_num_tokens and max_seq_len: at most what was built."""
    chosen = {}
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        built, wanted = getattr(limits, name), getattr(config, name)
        if wanted is not None and wanted > built:
            raise UsageError(
                f"{name} is beyond what the engine was built for",
                expected=f"at most {built}",
                got=str(wanted),
                hint=f"build the engine with --{name} {wanted}",
            )
        chosen[name] = built if wanted is None else wanted
    chosen["max_input_len"] = min(limits.max_input_len, chosen["max_seq_len"])
    return dataclasses.replace(limits, **chosen)
