"""How much memory this process can still have, and how many KV blocks that makes."""

import dataclasses
from pathlib import Path

from ingot.configs.sizes import format_bytes
from ingot.errors import CapacityError
from ingot.plan import KvLayout, Limits

_DEFAULT_SHARE = 0.4  # of the available memory, at most, unless kv_cache_memory says otherwise
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvBudget:
    """num_blocks blocks in all layers; they take `nbytes`, which the system commits as they are first written."""

    num_blocks: int
    nbytes: int


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without swapping: of the machine, or of the container if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _cached_files(cgroup / "memory.stat")
        available = min(available, limit - used)
    except (OSError, ValueError):  # no cgroup v2, or its limit is "max"
        pass
    return max(available, 0)


def _cached_files(stat: Path) -> int:
    """Bytes of files that a container has read and that give way to whatever needs memory."""
    if not stat.is_file():
        return 0
    return int(dict(line.split() for line in stat.read_text().splitlines()).get("inactive_file", 0))


def kv_budget(layout: KvLayout, limits: Limits, wanted: int | None, available: int) -> KvBudget:
    """Blocks for max_batch_size sequences of max_seq_len tokens within 40 % of `available`, or for `wanted` bytes.

    Raises CapacityError where that is too little for a single sequence or more than there is.
    """
    # the last token of a sequence is never fed back, so it needs no slot
    per_sequence = -(-(limits.max_seq_len - 1) // layout.tokens_per_block)
    if wanted is None:
        granted = int(available * _DEFAULT_SHARE)
        num_blocks = min(limits.max_batch_size * per_sequence, granted // layout.block_bytes)
        source = f"{format_bytes(granted)} (40 % of the available memory)"
    else:
        if wanted > available:
            raise CapacityError(
                "kv_cache_memory is more than this machine has left",
                expected=f"at most {format_bytes(available)}",
                got=format_bytes(wanted),
                hint="pass a smaller kv_cache_memory",
            )
        num_blocks = wanted // layout.block_bytes
        source = f"{format_bytes(wanted)} ({num_blocks} blocks)"
    if num_blocks < per_sequence:
        raise CapacityError(
            "the KV cache memory is too small for one sequence",
            expected=f"at least {format_bytes(per_sequence * layout.block_bytes)}: {limits.max_seq_len} tokens, "
            f"{per_sequence} blocks of {layout.tokens_per_block} tokens, {format_bytes(layout.block_bytes)} each",
            got=source,
            hint="pass a larger kv_cache_memory, or build the engine with a smaller max_seq_len",
        )
    return KvBudget(num_blocks=num_blocks, nbytes=num_blocks * layout.block_bytes)


def fits_beside(nbytes: int, layout: KvLayout, limits: Limits, wanted: int | None, available: int) -> bool:
    """Whether nbytes of `available` leave enough for `kv_budget`."""
    try:
        kv_budget(layout, limits, wanted, max(available - nbytes, 0))
    except CapacityError:
        return False
    return True
