"""What the system tells of this machine: the processor's name, and whether a KV cache can fit."""

import os
from pathlib import Path

from ingot.errors import CapacityError
from ingot.plan import Plan


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def pool_bytes(plan: Plan, num_blocks: tuple[int, ...]) -> int:
    """Bytes of the pools of all cache groups."""
    return sum(group.block_bytes * count for group, count in zip(plan.caches, num_blocks, strict=True))


def check_memory(plan: Plan, num_blocks: tuple[int, ...]) -> None:
    """KV memory is committed lazily, so that the system itself would refuse only when it is too late."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = pool_bytes(plan, num_blocks)
    if wanted > physical:
        raise CapacityError(
            "the KV cache is larger than this machine's memory",
            expected=f"at most {physical} bytes",
            got=f"{wanted} bytes ({sum(num_blocks)} blocks)",
            hint="pass a smaller kv_cache_memory",
        )
