"""What a step of a given cost takes on a device, and the table of devices.

GPUs come from `plugins/cuda/devices.py`, with the source of their figures; `here` measures the CPUs of this machine;
a TOML file describes others, or changes what is known:

    [[device]]
    name = "mine"
    like = "h100"        # a row of the table; without it every key must be there
    price = 2.5          # per hour, in any currency
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ingot.configs.read import Section, nearest, parse_toml
from ingot.configs.runtime import isa_includes
from ingot.errors import ConfigError, UsageError
from ingot.planner.cost import Int64, StepCost
from ingot.plugins.cpu.native import barrier_seconds, detect_isa, peak_flops, read_bandwidth
from ingot.plugins.cuda import devices as cuda
from ingot.plugins.cuda.target import CODES
from ingot.runtime.memory import available_memory

Float64 = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Float64)

_LEVELS = {"f32": ("avx512", "avx2"), "bf16": ("amx", "avx512bf16"), "int8": ("amx", "avx512", "avxvnni", "avx2")}
_BUFFER = 256 << 20  # bytes that are read to measure the memory
# Of CPU kernels, near the fits of `plan_accuracy --engine`: they read at full speed, but compute little meanwhile.
_CPU_REACHED = {"bytes_reached": 1.0, "operations_reached": 0.75, "overlap": 1.25}
_BARRIERS = 6  # of threads in each layer
LINK_REACHED = 2 / 3  # share of a link's data sheet bandwidth in a sum over ranks
_NVLINK, _NVLINK_SECONDS, _PCIE_SECONDS = 100e9, 8e-6, 20e-6  # links with less bandwidth are PCIe; of a message
ARITHMETICS = ("fp4", "fp8", "int8", "bf16", "f32")  # each runs at the rate of the next one where it has none
_LEAST = {"layer_seconds": 0, "request_seconds": 0, "call_seconds": 0, "link_seconds": 0, "price": 0, "overlap": 1}
_MOST_OVERLAP = 16.0  # more would change nothing but powers of seconds, which become 0
PARTS = ("memory", "compute", "links", "host")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or one machine's CPUs. Seconds, bytes, and operations per second.

    target      of the engines that it runs; "cpu": the best of this machine
    rates       of products by what they compute in: "f32", "bf16", "int8", "fp8", "fp4"
    bytes_reached, operations_reached  the share of bandwidth and rate that kernels reach
    layer_seconds    of each layer of a step, beside bytes and operations: launches, barriers
    request_seconds  of each sequence of a step: scheduling and drawing
    call_seconds     of each call of the session: a step, or decode steps in turn between which nothing is decided
    overlap     how far kernels read memory while they compute; 1 is not at all, see `_both`
    link_seconds, link_bandwidth  of one message to another rank
    price       per hour; 0: not known
    """

    name: str
    target: str
    memory: float
    bandwidth: float
    rates: Mapping[str, float]
    bytes_reached: float = 0.8
    operations_reached: float = 0.6
    layer_seconds: float = 40e-6
    request_seconds: float = 10e-6
    call_seconds: float = 0.0
    overlap: float = 6.0
    link_seconds: float = _NVLINK_SECONDS
    link_bandwidth: float = 300e9
    price: float = 0.0
    source: str = "given"

    def rate(self, arithmetic: str) -> float:
        """Operations per second; where the device does not know an arithmetic, those of the next wider one."""
        known = [name for name in ARITHMETICS[ARITHMETICS.index(arithmetic) :] if self.rates.get(name)]
        return self.rates[known[0]] if known else max(self.rates.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """One step by what bounds it. `parts` are in the order of PARTS."""

    parts: tuple[float, float, float, float]

    @property
    def total(self) -> float:
        return sum(self.parts)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return PARTS[int(np.argmax(self.parts))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLoad:
    """Sequences that decode, or those that do not. For each window: the tokens that all of them see, and the pairs of a
    row and a token that it sees."""

    sequences: float
    seen: Mapping[int, tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLoad:
    """What a step computes: rows, rows of logits, sequences, and the attention of decode rows and of prompts."""

    rows: float
    logit_rows: float
    sequences: float
    attention: tuple[AttentionLoad, ...]


def step_load(past: Int64, new: Int64, logit_rows: int, windows: Collection[int]) -> StepLoad:
    """A step of sequences with `past` tokens in the cache and `new` ones. windows: of the caches; 0: rows see all."""
    rows = int(new.sum())
    kinds = [(past, new)] if rows == len(new) else [(past[kind], new[kind]) for kind in (new == 1, new > 1)]
    attention = []
    for before, count in kinds:
        seen, pairs = before + count, count * before + count * (count + 1) / 2
        sums: dict[int, tuple[float, float]] = {}
        for window in windows:
            if window:
                limited = np.minimum(seen, window + count), np.minimum(pairs, count * window)
                sums[window] = (float(limited[0].sum()), float(limited[1].sum()))
            else:
                sums[window] = (float(seen.sum()), float(pairs.sum()))
        attention.append(AttentionLoad(sequences=len(count), seen=sums))
    return StepLoad(rows=rows, logit_rows=logit_rows, sequences=len(new), attention=tuple(attention))


def load_seconds(cost: StepCost, device: Device, ranks: int, load: StepLoad) -> StepSeconds:
    """One step on ranks that each have this cost.

    Products, attention of decode rows and attention of prompts come one after another; each takes what its bytes or its
    operations take, whichever is longer (`_both`).
    """
    memory, compute, links, host = _without_attention(cost, device, ranks, load.rows, load.logit_rows, load.sequences)
    for kind in load.attention:
        nbytes = operations = 0.0
        for cache in cost.caches:
            seen, pairs = kind.seen[cache.window]
            nbytes += seen * cache.token_bytes + kind.sequences * cache.state_bytes
            operations += pairs * cache.operations
        read, computed = _reading(device, nbytes), _computing(device, operations, "bf16")
        both = _both(device, read, computed)
        memory, compute = memory + both * (read >= computed), compute + both * (read < computed)
    return StepSeconds(parts=(memory, compute, links, host))


def step_seconds(cost: StepCost, device: Device, ranks: int, past: Int64, new: Int64, logit_rows: int) -> StepSeconds:
    """One step of sequences with `past` tokens in the cache and `new` ones, see `load_seconds`."""
    load = step_load(past, new, logit_rows, {cache.window for cache in cost.caches})
    return load_seconds(cost, device, ranks, load)


def decode_seconds(
    costs: Sequence[StepCost], device: Device, ranks: int, batches: Sequence[Sequence[int]], steps: int
) -> Float64:
    """Seconds of this many decode steps in turn of each of some batches, each of one token of every sequence, on ranks
    of each of these costs. batches: the tokens in the cache of each sequence. [costs, batches, steps]"""
    turns, sizes = np.arange(steps), [len(past) for past in batches]
    count = np.array(sizes, np.float64)[:, None]
    total = np.array([sum(past) for past in batches], np.float64)[:, None]
    nbytes: Float64 = count * np.array([[[sum([cache.state_bytes for cache in cost.caches])]] for cost in costs])
    operations: Float64 = np.zeros((1, 1, 1))
    for window in {cache.window for cost in costs for cache in cost.caches}:
        seen = pairs = total + count * (turns + 1)
        if window:
            befores = [np.array(past) + turns[:, None] for past in batches]
            seen = np.array([np.minimum(before + 1, window + 1).sum(axis=1) for before in befores])
            pairs = np.array([np.minimum(before + 1, window).sum(axis=1) for before in befores])
        own = [[cache for cache in cost.caches if cache.window == window] for cost in costs]
        nbytes = nbytes + seen * np.array([[[sum([cache.token_bytes for cache in caches])]] for caches in own])
        operations = operations + pairs * np.array([[[sum([cache.operations for cache in caches])]] for caches in own])
    rest = {
        size: [sum(_without_attention(cost, device, ranks, size, size, size)) for cost in costs] for size in set(sizes)
    }
    fixed = np.array([rest[size] for size in sizes]).T[:, :, None]
    found: Float64 = fixed + _both(device, _reading(device, nbytes), _computing(device, operations, "bf16"))
    return found


def _without_attention(
    cost: StepCost, device: Device, ranks: int, rows: float, logit_rows: float, sequences: float
) -> tuple[float, float, float, float]:
    """Seconds of a step but for attention, in the order of PARTS."""
    drawn = min(logit_rows, 1.0)
    moved = cost.weights + drawn * cost.head
    moved += cost.experts * (1 - (1 - cost.taken) ** rows) + cost.drawn_experts * (1 - (1 - cost.taken) ** logit_rows)
    moved += rows * cost.row_bytes + logit_rows * cost.logit_bytes
    operations = rows * cost.row_operations + logit_rows * cost.logit_operations
    read, computed = _reading(device, moved), _computing(device, operations, cost.arithmetic)
    meetings, sent = float(cost.messages), rows * cost.sent_bytes
    if ranks > 1:
        meetings += cost.collectives + drawn
        sent += rows * cost.met_bytes * cost.collectives * 2 * (ranks - 1) / ranks + logit_rows * cost.gathered_bytes
    links = meetings * device.link_seconds + sent / device.link_bandwidth
    host = cost.layers * device.layer_seconds + cost.draws * sequences * device.request_seconds
    both = _both(device, read, computed)
    return both * (read >= computed), both * (read < computed), links, host


def _both(device: Device, read: Number, computed: Number) -> Number:
    """Seconds of reading and computing together.

    It is the norm of order `overlap` of the two times. Order 1 is their sum. Order 6 is at most 12 % more than the
    longer one: some kernels wait for memory while others compute, and each kernel waits for its first bytes.
    """
    order = min(device.overlap, _MOST_OVERLAP)
    taken: Number = (read**order + computed**order) ** (1 / order)
    return taken


def _reading(device: Device, nbytes: Number) -> Number:
    return nbytes / (device.bytes_reached * device.bandwidth)


def _computing(device: Device, operations: Number, arithmetic: str) -> Number:
    return operations / device.rate(arithmetic) / device.operations_reached


def gpu_devices() -> dict[str, Device]:
    """Those of the table for which ingot builds engines."""
    targets = {code: target for target, code in CODES.items()}
    return {
        each.name: Device(
            name=each.name,
            target=targets[each.code],
            memory=each.memory,
            bandwidth=each.bandwidth,
            rates={"f32": each.rate_f32, "bf16": each.rate} | ({"fp8": each.rate_fp8} if each.rate_fp8 else {}),
            bytes_reached=cuda.BYTES,
            operations_reached=cuda.OPERATIONS,
            link_seconds=_NVLINK_SECONDS if each.link > _NVLINK else _PCIE_SECONDS,
            link_bandwidth=LINK_REACHED * each.link,
            source=each.source,
        )
        for each in cuda.DEVICES.values()
        if each.code in targets
    }


def measure_here(target: str = "cpu") -> Device:
    """This machine's CPUs: memory, and arithmetic by the fastest instructions of the level that it prefers. Links and
    shares are assumptions."""
    rates: dict[str, float] = {}
    best = detect_isa()
    usable = () if best == "none" else isa_includes(best)
    for kind, levels in _LEVELS.items():
        if found := [peak_flops(f"{kind}.{level}") for level in levels if level in usable]:
            rates[kind] = max(found)
    return Device(
        name="here",
        target=target,
        memory=float(available_memory()),
        bandwidth=read_bandwidth(_BUFFER),
        rates=rates,
        layer_seconds=_BARRIERS * barrier_seconds(),
        **_CPU_REACHED,
        link_seconds=20e-6,
        link_bandwidth=1.25e9,
        source="measured here; links: 10 Gb/s are assumed",
    )


def read_devices(asked: str) -> list[Device]:
    """A file, or names with commas between them. Raises UsageError for a name that is not known, and ConfigError for a
    file that is wrong."""
    table, path = gpu_devices(), Path(asked)
    if not path.is_file():
        names = [name.strip() for name in asked.split(",")]
        return [measure_here() if name == "here" else _known(name, table, "--devices") for name in names]
    file = parse_toml(path.read_bytes(), asked)
    devices = [_read(row, table) for row in file.tables("device")]
    file.refuse_unknown()
    if not devices:
        raise ConfigError("the file names no device", where=asked, expected="[[device]] tables")
    return devices


def _known(name: str, table: Mapping[str, Device], where: str) -> Device:
    if name not in table:
        hint = nearest(name, list(table)) or "give a TOML file with [[device]] entries for others"
        raise UsageError(
            f"there is no device {name!r:.40}",
            where=where,
            expected=", ".join((*table, "here")),
            got=repr(name),
            hint=hint,
        )
    return table[name]


def _read(row: Section, table: Mapping[str, Device]) -> Device:
    """One entry of a file."""
    like = row.text("like") if row.has("like") else None
    base = None
    if like is not None:
        base = measure_here() if like == "here" else _known(like, table, row.place("like"))
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Device):
        usual: Any = field.default if base is None else getattr(base, field.name)
        if usual is dataclasses.MISSING:
            usual = None
        if field.name == "rates":
            values["rates"] = _rates(row) or usual
        elif field.type is str:
            values[field.name] = row.text(field.name, usual)
        elif field.name in _LEAST:
            values[field.name] = row.number(field.name, usual, minimum=_LEAST[field.name])
        else:
            values[field.name] = row.number(field.name, usual, above=0)
    row.refuse_unknown()
    if not values["rates"]:
        raise ConfigError("rates is missing", where=row.place("rates"), expected="{f32 = ..., bf16 = ...}")
    return Device(**values)


def _rates(row: Section) -> dict[str, float]:
    rates = row.section("rates")
    return {name: rates.number(name, above=0) for name in ARITHMETICS if rates.has(name)}
