"""How an engine is run: what `ModelRunner.from_dir` and the commands take beside the engine itself."""

import dataclasses
import enum
import math
import os
from pathlib import Path

from ingot.configs.names import check_name, check_target
from ingot.configs.sizes import parse_bytes
from ingot.configs.speculation import Speculation, read_speculation
from ingot.errors import UsageError

# Levels of x86 CPUs, each with the level that it extends. AVX-512 and AVX-VNNI are two branches. The order is that of
# lists and documents; `preferred_isas` gives the order in which this machine's CPU prefers them.
ISA_BASES = {"amx": "avx512bf16", "avx512bf16": "avx512", "avx512": "avx2", "avxvnni": "avx2", "avx2": None}
ISA_LEVELS = tuple(reversed(ISA_BASES))
COLLECTIVES = ("auto", "shm", "mpi")


class Policy(enum.Enum):
    """What the scheduler promises a request that it admits.

    MAX_UTILIZATION      blocks for the tokens it has now; when blocks run out, a request is preempted
    GUARANTEED_NO_EVICT  blocks for its whole length; nothing is ever preempted, fewer requests run at once
    """

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """None means: decided from the engine and the machine.

    rank                 which rank file of the engine
    threads              None takes every core of the process
    isa                  cap on what this machine claims: avx2, avxvnni, avx512, avx512bf16 or amx
    target               of an engine with several: which one to run, or a family such as "cpu"; None is what fits best
    kv_cache_memory      bytes; None is min(max_batch_size x max_seq_len tokens, 40 % of the available memory)
    max_batch_size       requests running at once; at most the engine's
    max_num_tokens       tokens per step; at most the engine's. None on CPUs: 512 of prompts beside decode rows
    max_seq_len          tokens of a request, prompt included; at most the engine's
    enable_prefix_cache  lets requests share the blocks of equal heads
    enable_chunked_prefill  False: a step carries either whole prompts or decode rows
    tpot_target          milliseconds that steps with decode rows should take at most
    policy               see `Policy`
    rank_timeout         seconds that the processes of other ranks may be late, before all of them end
    collectives          where ranks meet: "shm" in the memory of one machine, "mpi" by MPI; "auto": shm where it can be
    speculation          how drafts of further tokens are made; None: there are none
    use_mmap             True: weights are used where the file is mapped; False: on CPUs from a copy in 2 MiB pages, if
                         there is memory for it
    """

    rank: int = 0
    threads: int | None = None
    isa: str | None = None
    target: str | None = None
    kv_cache_memory: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    enable_prefix_cache: bool = True
    enable_chunked_prefill: bool = True
    tpot_target: float | None = None
    policy: Policy = Policy.MAX_UTILIZATION
    rank_timeout: float = 30.0
    collectives: str = "auto"
    use_mmap: bool = False
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "max_batch_size", "max_num_tokens", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} must be a whole number, at least 1", got=repr(value))
        if not isinstance(self.rank, int) or self.rank < 0:
            raise UsageError("rank must be a whole number, at least 0", got=repr(self.rank))
        if self.isa is not None:
            check_name("isa", self.isa, ISA_LEVELS)
        if self.target is not None:
            check_target(self.target)
        check_name("collectives", self.collectives, COLLECTIVES)
        for name in ("enable_prefix_cache", "enable_chunked_prefill", "use_mmap"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False", got=repr(getattr(self, name)))
        if not _is_positive(self.rank_timeout):
            raise UsageError("rank_timeout must be a number of seconds, more than 0", got=repr(self.rank_timeout))
        if self.tpot_target is not None and not _is_positive(self.tpot_target):
            raise UsageError("tpot_target must be a number of milliseconds, more than 0", got=repr(self.tpot_target))


def isa_includes(isa: str) -> tuple[str, ...]:
    """A level and those that it stands on, the highest first."""
    base = ISA_BASES[isa]
    return (isa,) if base is None else (isa, *isa_includes(base))


def read_path(name: str, value: object) -> Path:
    """A directory or file as users name it. Raises UsageError for what is not a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} must be a path", got=repr(value)[:100])
    return Path(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def runtime_config(
    *,
    rank: int = 0,
    threads: int | None = None,
    isa: str | None = None,
    target: str | None = None,
    kv_cache_memory: int | str | None = None,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    enable_prefix_cache: bool = True,
    enable_chunked_prefill: bool = True,
    tpot_target: float | None = None,
    policy: Policy | str = Policy.MAX_UTILIZATION,
    use_mmap: bool = False,
    rank_timeout: float = 30.0,
    collectives: str = "auto",
    speculative_config: object = None,
) -> RuntimeConfig:
    """A RuntimeConfig from values as users write them: "2GiB", "guaranteed_no_evict". Raises UsageError."""
    try:
        chosen = Policy(policy)
    except ValueError as error:
        raise UsageError(
            f"unknown policy {policy!r:.40}", expected=", ".join(p.value for p in Policy), got=repr(policy)
        ) from error
    return RuntimeConfig(
        rank=rank,
        threads=threads,
        isa=isa,
        target=target,
        kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory, name="kv_cache_memory"),
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        enable_prefix_cache=enable_prefix_cache,
        enable_chunked_prefill=enable_chunked_prefill,
        tpot_target=tpot_target,
        policy=chosen,
        use_mmap=use_mmap,
        rank_timeout=rank_timeout,
        collectives=collectives,
        speculation=None if speculative_config is None else read_speculation(speculative_config),
    )
