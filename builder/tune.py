"""Autotuning: each shape of matrix product, those of experts included, is timed on this machine for several numbers of
rows, in every way (tactic) that its kernel has. All ways give the same bits; the plan says which to take.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.builder.timing_cache import Times, TimingCache
from ingot.plan import Buffer, Plan, Rows, Step
from ingot.plugins.layouts import group_of, panel_bytes
from ingot.plugins.registry import find_op
from ingot.plugins.target import Product, SelfTuning, Target, Tunable

ROWS = (1, 8, 32, 512)  # timed for 1, 2 .. 8, 9 .. 32 and more rows
FIRST_ROWS = (1, 2, 9, 33)  # of each class
SHIPPED = 0
MIN_GAIN = 0.95  # another way must take less than this part of the shipped way's time
MIN_WEIGHTS = 1 << 21  # smaller products take microseconds either way
MAX_BYTES = 8 << 20  # of the weights timed: of a larger product only so many columns, for memory's and for time's sake
MAX_EXPERT_BYTES = 32 << 20  # of all experts together, of which a call reads some
LEAST_PANELS = 8  # of an expert that is timed: where that is too much, fewer experts are
ROUNDS = 5  # each times every product in all its ways
LEAST_ROUNDS = 2  # of a product that takes longer than LONG seconds, all ways together
LONG = 0.05
MEMORY = 96 << 20  # what timing needs at most beside the weights of a usual product

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """tactics: step → a digit per class of rows; table: lines for people; notes: what was not timed, and why."""

    tactics: dict[str, str]
    table: tuple[str, ...]
    notes: tuple[str, ...]


def tune(plan: Plan, target: Target, cache_path: Path | None, progress: Progress | None = None) -> Tuning:
    """Time what the cache does not know. Raises UsageError for a file that is not a timing cache."""
    if not isinstance(target, Tunable) or target.run_blocker() is not None:
        why = "its kernels have one tactic each"
        if (reason := target.run_blocker()) is not None:
            why = f"{reason}. To measure it, run `ingot bench kernels` on a machine that has it"
        told = isinstance(target, Tunable) or (cache_path is not None and not isinstance(target, SelfTuning))
        return Tuning(tactics={}, table=(), notes=(f"nothing is timed for {target.name}: {why}",) if told else ())
    cache = TimingCache(target.machine(), cache_path)
    notes = [f"the timing cache holds nothing of this machine, only of: {each}" for each in cache.other_machines()]
    packed = [(step, op.packed) for step in plan.steps if not (op := find_op(step.op)).stacked]
    steps = {step.name: _product(plan, step, place) for step, place in packed if place is not None}
    most: dict[Product, int] = {}
    for step in plan.steps:
        if (product := steps.get(step.name)) is not None and _weights(product) >= MIN_WEIGHTS:
            most[product] = max(_max_rows(plan, step), most.get(product, 0))
    work = [(product, rows) for product in most for rows in _row_counts(most[product])]
    _time(target, cache, work, progress)
    cache.save()
    digits: dict[Product, str] = {}
    table: list[str] = []
    for product, rows in work:
        times = cache.times[_key(product, rows)]
        best = _best(times)
        digits[product] = digits.get(product, "") + str(best)
        table.append(_line(product, rows, target.tactics(product, rows), times, best))
    if work and len(most) < len(set(steps.values())):
        notes.append(f"matmuls of fewer than {MIN_WEIGHTS} weights were not timed: they use the default kernel")
    tactics = {name: digits[product].ljust(len(ROWS), "0") for name, product in steps.items() if product in digits}
    return Tuning(tactics=tactics, table=tuple(table), notes=tuple(notes))


def _product(plan: Plan, step: Step, packed: int) -> Product:
    weight = next(weight for weight in plan.weights if weight.name == step.inputs[packed])
    (*experts, n, k), group = weight.shape, group_of(weight.layout)
    return Product(
        kernel=find_op(step.op).plain(step).kernel,
        n=n,
        k=k,
        group=group,
        gated=find_op(step.op).gated(step.attrs),
        panel_bytes=panel_bytes(k, weight.dtype, group),
        experts=experts[0] if experts else 0,
        slots=_buffer(plan, step.inputs[1]).cols if experts else 0,
    )


def _weights(product: Product) -> int:
    """That one row is multiplied with."""
    return product.n * product.k * max(product.slots, 1)


def _buffer(plan: Plan, name: str) -> Buffer:
    return next(buffer for buffer in plan.buffers if buffer.name == name)


def _max_rows(plan: Plan, step: Step) -> int:
    rows = _buffer(plan, step.outputs[0]).rows
    return plan.limits.max_num_tokens if rows is Rows.TOKENS else plan.limits.max_logit_rows


def _row_counts(most: int) -> Iterator[int]:
    """A number of rows for each class that a step may have."""
    for rows, first in zip(ROWS, FIRST_ROWS, strict=True):
        if first <= most:
            yield min(rows, most)


def _key(product: Product, rows: int) -> str:
    return f"{product} rows {rows}"


def _time(target: Tunable, cache: TimingCache, work: list[tuple[Product, int]], progress: Progress | None) -> None:
    """Put seconds of each tactic into the cache, where it has none; of a large product only a part is timed.

    The fastest round counts, and between two of a product lie those of all others: what else the machine does for
    some seconds, and which may slow one way down more than another, does not meet all of its rounds.
    """
    best = {
        each: [math.inf] * ways
        for each in work
        if len(cache.times.get(_key(*each), ())) != (ways := len(target.tactics(*each)))
    }
    done = 0
    for turn in range(ROUNDS):
        for (product, rows), times in best.items():
            if turn < LEAST_ROUNDS or sum(times) <= LONG:
                part = _part(product)
                for tactic, least in enumerate(times):
                    times[tactic] = min(least, target.time_product(part, rows, tactic))
            done += 1
            if progress is not None:
                progress("timing kernels", done, len(best) * ROUNDS)
    cache.times.update({_key(*each): tuple(times) for each, times in best.items()})


def _part(product: Product) -> Product:
    """The first columns of a large product; of very many experts only some, but as many as a row takes."""
    if not product.experts:
        return dataclasses.replace(product, n=min(product.n, max(1, MAX_BYTES // product.panel_bytes) * 16))
    fitting = MAX_EXPERT_BYTES // (LEAST_PANELS * product.panel_bytes)
    experts = min(product.experts, max(product.slots, fitting))
    panels = max(LEAST_PANELS, MAX_EXPERT_BYTES // (experts * product.panel_bytes))
    return dataclasses.replace(product, n=min(product.n, panels // 2 * 32), experts=experts)


def _best(times: Times) -> int:
    """The fastest tactic, but the shipped one where the others gain next to nothing."""
    fastest = min(range(len(times)), key=times.__getitem__)
    return fastest if times[fastest] < MIN_GAIN * times[SHIPPED] else SHIPPED


def _line(product: Product, rows: int, names: tuple[str, ...], times: Times, best: int) -> str:
    shown = ", ".join(
        f"{name} {seconds * 1e3:.3f} ms{' (chosen)' if tactic == best else ''}"
        for tactic, (name, seconds) in enumerate(zip(names, times, strict=True))
    )
    return f"{product}, {rows} {'row' if rows == 1 else 'rows'}: {shown}"
