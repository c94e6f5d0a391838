"""What is asked of an advisor, and its answer: the front of size, speed and loss, and the point that is picked."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ingot.configs.sizes import format_bytes
from ingot.errors import UsageError

BATCHES = (1, 32)
MIXTURES = 3
TOKENS = 2048
_NOISE = 0.03  # relative, of speeds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdviseOptions:
    """batch: sequences that decode together, by which the fastest is picked.

    memory      bytes of weights, and of the KV cache of `batch` sequences of `context` tokens
    kl_budget   mean KL from the exact model, at most
    ppl_budget  perplexity, at most this many times that of the exact model
    pick        number of a point; instead of budgets
    tokens      of the text, at most
    mixtures    of precisions that are tried, at most, beside those with the same one everywhere
    measured    file that keeps what was measured
    autotune    time matrix products, as a build does
    """

    batch: int = 1
    context: int = 2048
    memory: int | None = None
    kl_budget: float | None = None
    ppl_budget: float | None = None
    pick: int | None = None
    tokens: int = TOKENS
    mixtures: int = MIXTURES
    measured: Path | None = None
    autotune: bool = True

    def __post_init__(self) -> None:
        if self.pick is not None and (self.kl_budget, self.ppl_budget, self.memory) != (None, None, None):
            raise UsageError(
                "--pick cannot be combined with --kl_budget, --ppl_budget or --memory",
                hint="leave out --pick or the others",
            )

    @property
    def picks(self) -> bool:
        """Whether a point is asked for."""
        return (self.pick, self.kl_budget, self.ppl_budget, self.memory) != (None, None, None, None)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({*BATCHES, self.batch}))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A recipe and what was measured of it.

    weights      in words; activations: what products of quantised weights take
    nbytes       of weights; serving: with the KV cache of the sequences that were asked for
    decode       tokens per second by sequences that decode together; prefill: of one prompt
    kl, perplexity  on the text; modelled_kl: what the additive model foretold, of float inputs
    front        whether no other point is better in everything
    """

    weights: str
    activations: str
    recipe: str
    nbytes: int
    serving: int
    decode: dict[int, float]
    prefill: float
    kl: float
    perplexity: float
    modelled_kl: float | None
    front: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCheck:
    """Tokens per second of whole requests, beside what steps foretold."""

    weights: str
    activations: str
    batch: int
    predicted: float
    measured: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """points: those of the front first, by size. picked: an index, None where nothing was asked for."""

    target: str
    tokens: int
    perplexity: float
    points: tuple[Point, ...]
    checks: tuple[SpeedCheck, ...]
    picked: int | None

    @property
    def front(self) -> tuple[Point, ...]:
        return tuple(each for each in self.points if each.front)


def by_front(points: Sequence[Point], batches: Sequence[int]) -> list[Point]:
    """Those that nothing beats first; by size."""
    marked = [
        dataclasses.replace(each, front=not any(_beats(other, each, batches) for other in points if other is not each))
        for each in points
    ]
    return sorted(marked, key=lambda each: (not each.front, each.nbytes, each.kl))


def _beats(one: Point, other: Point, batches: Sequence[int]) -> bool:
    """At least as small and exact, and no slower than timings tell apart."""
    as_fast = all(one.decode[each] >= (1 - _NOISE) * other.decode[each] for each in batches)
    return (
        as_fast
        and one.nbytes <= other.nbytes
        and one.kl <= other.kl
        and (one.nbytes, one.kl) != (other.nbytes, other.kl)
    )


def pick(options: AdviseOptions, points: Sequence[Point], perplexity: float) -> int:
    """Number of the point. Raises UsageError where there is none."""
    front = [i for i, each in enumerate(points) if each.front]
    if options.pick is not None:
        if not 1 <= options.pick <= len(front):
            raise UsageError(
                f"--pick {options.pick} is not a point of the table",
                expected=f"1 to {len(front)}",
                got=str(options.pick),
            )
        return front[options.pick - 1]
    kept = [
        i
        for i in front
        if (options.kl_budget is None or points[i].kl <= options.kl_budget)
        and (options.ppl_budget is None or points[i].perplexity <= options.ppl_budget * perplexity)
        and (options.memory is None or points[i].serving <= options.memory)
    ]
    if not kept:
        exact = min((points[i] for i in front), key=lambda each: each.kl)
        small = min((points[i] for i in front), key=lambda each: each.serving)
        raise UsageError(
            "no recipe keeps to the budgets",
            expected=f"budgets that allow, at the least, KL {exact.kl:.2g} or {format_bytes(small.serving)}",
            got=f"the most exact one, {exact.weights}, needs {format_bytes(exact.serving)}; the smallest one, "
            f"{small.weights}, has KL {small.kl:.2g} and {small.perplexity / perplexity:.4f} times the perplexity",
            hint="allow more loss or more memory, or lower --batch",
        )
    return max(kept, key=lambda i: points[i].decode[options.batch])
