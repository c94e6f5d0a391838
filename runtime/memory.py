"""How much memory this process had and can still have, and how many KV blocks that makes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ingot.configs.sizes import format_bytes
from ingot.errors import CapacityError
from ingot.plan import STATE_SLOTS, CacheGroup, Limits, window_blocks

_DEFAULT_SHARE = 0.4  # of the available memory, at most, unless kv_cache_memory says otherwise
_WINDOW_CHUNK = 2048  # tokens of a step that groups with windows have room for, whatever max_num_tokens is
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # that of the container


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvBudget:
    """num_blocks blocks of each cache group; they take `nbytes`, which the system commits as they are first written."""

    num_blocks: tuple[int, ...]
    nbytes: int


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = CONTROL_GROUP) -> int:
    """Bytes that are free without swapping: of the machine, or of the container if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _cached_files(cgroup / "memory.stat")
        available = min(available, limit - used)
    except (OSError, ValueError):  # no cgroup v2, or its limit is "max"
        pass
    return max(available, 0)


def peak_memory() -> int:
    """The most bytes that were resident in this process. What getrusage tells can be of the process that started it."""
    return 1024 * int(dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())["VmHWM"].split()[0])


def _cached_files(stat: Path) -> int:
    """Bytes of files that a container has read and that give way to whatever needs memory."""
    if not stat.is_file():
        return 0
    return int(dict(line.split() for line in stat.read_text().splitlines()).get("inactive_file", 0))


def kv_budget(groups: Sequence[CacheGroup], limits: Limits, wanted: int | None, available: int) -> KvBudget:
    """Blocks for max_batch_size sequences of max_seq_len tokens within 40 % of `available`, or for `wanted` bytes.

    Groups that keep everything and groups with windows get half of the memory each: however long sequences are, at
    least half as many fit as if the division had been made for their length. A half is as large as one sequence needs;
    what it has beyond the needs of max_batch_size sequences goes to the other one. Pools of a half hold as many
    sequences as each other.
    Raises CapacityError where that is too little for a single sequence or more than there is.
    """
    one = _needed(groups, limits, 1, snapshots=False)
    most = _needed(groups, limits, limits.max_batch_size, snapshots=True)
    if wanted is None:
        granted = int(available * _DEFAULT_SHARE)
        source = f"{format_bytes(granted)} (40 % of the available memory)"
    else:
        if wanted > available:
            raise CapacityError(
                "kv_cache_memory is more than this machine has left",
                expected=f"at most {format_bytes(available)}",
                got=format_bytes(wanted),
                hint="pass a smaller kv_cache_memory",
            )
        granted = wanted
        source = f"{format_bytes(wanted)} ({wanted // sum(group.block_bytes for group in groups)} blocks)"
    least = least_kv_bytes(groups, limits)
    if granted < least:
        size = groups[0].tokens_per_block
        blocks = ", ".join(
            f"{count} blocks of {size} tokens, {format_bytes(group.block_bytes)} each"
            for count, group in zip(one, groups, strict=True)
        )
        raise CapacityError(
            "the KV cache memory is too small for one sequence",
            expected=f"at least {format_bytes(least)}: {limits.max_seq_len} tokens, {blocks}",
            got=source,
            hint="pass a larger kv_cache_memory, or build the engine with a smaller max_seq_len",
        )
    num_blocks = _divided(groups, one, most, granted)
    if wanted is None:
        num_blocks = [min(counts) for counts in zip(num_blocks, most, strict=True)]
    return KvBudget(num_blocks=tuple(num_blocks), nbytes=_bytes(groups, num_blocks))


def least_kv_bytes(groups: Sequence[CacheGroup], limits: Limits) -> int:
    """Bytes without which `kv_budget` refuses: of one sequence of max_seq_len tokens."""
    return _bytes(groups, _needed(groups, limits, 1, snapshots=False))


def _needed(groups: Sequence[CacheGroup], limits: Limits, sequences: int, *, snapshots: bool) -> list[int]:
    """Blocks of each group for this many sequences of max_seq_len tokens. snapshots: and for those of their states."""
    size = groups[0].tokens_per_block
    longest = -(-(limits.max_seq_len - 1) // size)  # the last token of a sequence is never fed back: it needs no slot
    chunk = -(-min(limits.max_num_tokens, _WINDOW_CHUNK) // size)
    return [
        _state_slots(groups, group, longest, snapshots=snapshots) * sequences
        if group.state
        else min(longest * sequences, window_blocks(group.window, size) * sequences + chunk)
        if group.window
        else longest * sequences
        for group in groups
    ]


def _state_slots(groups: Sequence[CacheGroup], group: CacheGroup, longest: int, *, snapshots: bool) -> int:
    """Slots that a sequence of this many blocks must have, or has with all its snapshots."""
    more = longest // snapshot_stride(groups, group) + 2 if snapshots else 0
    return min(longest, STATE_SLOTS + more)


def snapshot_stride(groups: Sequence[CacheGroup], group: CacheGroup) -> int:
    """Blocks of a prompt between two snapshots of its state, 0 for a group without states: snapshots take about as
    many bytes as the keys and values of the tokens between them."""
    if not group.state:
        return 0
    between = sum(each.block_bytes for each in groups if not each.window)
    return max(1, -(-group.block_bytes // between)) if between else 1


def _divided(groups: Sequence[CacheGroup], one: Sequence[int], most: Sequence[int], granted: int) -> list[int]:
    """Blocks of each group in `granted` bytes: at least `one`, and more than `most` only where all have that."""
    windows = [bool(group.window) for group in groups]
    needs = [[count * window for count, window in zip(counts, windows, strict=True)] for counts in (one, most)]
    least, enough = (_bytes(groups, counts) for counts in needs)  # of the groups with windows
    rest, plenty = _bytes(groups, one) - least, _bytes(groups, most) - enough  # of the others
    half = granted if least else 0  # for groups with windows
    if least and rest:
        half = min(max(granted // 2, least), granted - rest)
        if half > enough:
            half = max(enough, min(half, granted - plenty))
        elif granted - half > plenty:
            half = min(enough, granted - plenty)
    parts = [half if window else granted - half for window in windows]
    of_one = [least if window else rest for window in windows]
    return [part * count // whole for part, count, whole in zip(parts, one, of_one, strict=True)]


def _bytes(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> int:
    return sum(group.block_bytes * count for group, count in zip(groups, num_blocks, strict=True))


def fits_beside(nbytes: int, groups: Sequence[CacheGroup], limits: Limits, wanted: int | None, available: int) -> bool:
    """Whether nbytes of `available` leave enough for `kv_budget`."""
    try:
        kv_budget(groups, limits, wanted, max(available - nbytes, 0))
    except CapacityError:
        return False
    return True
