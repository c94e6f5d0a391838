"""Engine directory → target → Session, with every limit and the KV memory decided before anything is allocated."""

import dataclasses
from pathlib import Path

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.engine import Engine, open_engine, read_manifest
from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.plugins.cpu.target import crc32 as native_crc32
from ingot.plugins.cpu.target import detect_isa
from ingot.plugins.registry import fit_targets
from ingot.plugins.target import SessionOptions
from ingot.runtime.memory import available_memory, kv_budget
from ingot.step_io import Session


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEngine:
    """limits: the engine's, lowered to what the runtime config asks for."""

    engine: Engine
    session: Session
    limits: Limits


def load_engine(directory: Path | str, config: RuntimeConfig) -> LoadedEngine:
    """Open and check an engine and load it on this machine: of several targets the one that fits best.

    Raises EngineError (damaged), TargetError (this machine cannot run it), UsageError (limits beyond the engine's),
    CapacityError (memory).
    """
    names = read_manifest(directory).targets
    target = fit_targets(names, where=str(directory), wanted=config.target, isa=config.isa).best()
    crc32 = _crc32 if detect_isa() != "none" else None
    engine = open_engine(directory, rank=config.rank, crc32=crc32, target=target.name)
    limits = lowered(engine.plan.limits, config)
    on_device = target.kv_memory(engine.plan)
    available = available_memory() if on_device is None else on_device
    budget = kv_budget(engine.plan.kv, limits, config.kv_cache_memory, available)
    options = SessionOptions(num_blocks=budget.num_blocks, threads=config.threads, directory=Path(directory))
    session = target.open_session(engine.plan, engine.weights, options)
    return LoadedEngine(engine=engine, session=session, limits=limits)


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
                f"{name} is beyond what the engine was built for", expected=f"at most {built}", got=str(wanted),
                hint=f"build the engine with --{name} {wanted}",
            )  # fmt: skip
        chosen[name] = built if wanted is None else wanted
    chosen["max_input_len"] = min(limits.max_input_len, chosen["max_seq_len"])
    return dataclasses.replace(limits, **chosen)
