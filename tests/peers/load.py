"""A mixed load: which requests come when, and what became of them.

Imported in every engine's environment: nothing but the standard library.
"""

import dataclasses
import json
from collections.abc import Sequence

MAX_INPUT, MAX_OUTPUT = 768, 256  # tokens that a request has at most
RUNNING = 64  # requests that an engine runs at once, what ingot builds for by default; more wait
WARMING = ([[*range(400, 656)], [*range(700, 764)]], 8)  # prompts, one after the other, and tokens to generate for each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """prompts: token ids; outputs: how many tokens each generates.

    arrivals    seconds from the start, ascending; None: each request comes when the one before has ended
    ttft, tpot  seconds, which a good request keeps below
    allowed     the run is given up when more requests have missed one of them; None: never
    """

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[int]
    arrivals: Sequence[float] | None
    ttft: float
    tpot: float
    allowed: int | None

    def as_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Load":
        """What `as_json` wrote."""
        return Load(**json.loads(text))


@dataclasses.dataclass(kw_only=True, slots=True)
class Fate:
    """Of one request. due: when it was to come; first, last: when its tokens came; seconds from the start of the run.

    error: why it will not end, or ended badly
    """

    due: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    ended: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds, from the planned arrival: an engine that falls behind cannot hide it."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is no more than one."""
        return None if self.first is None or self.tokens < 2 else (self.last - self.first) / (self.tokens - 1)

    def token(self, now: float, count: int = 1) -> None:
        """So many have come."""
        self.first = now if self.first is None else self.first
        self.last, self.tokens = now, self.tokens + count

    def good(self, ttft: float, tpot: float) -> bool:
        """Ended, and within both limits."""
        on_time = self.ttft is not None and self.ttft < ttft
        return self.ended and self.error is None and on_time and (self.tpot is None or self.tpot < tpot)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What became of a load. complete: False where it was given up; seconds: from the first arrival to the end."""

    fates: Sequence[Fate]
    complete: bool
    seconds: float

    def as_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Run":
        """What `as_json` wrote."""
        fields = json.loads(text)
        return Run(**{**fields, "fates": [Fate(**fate) for fate in fields["fates"]]})


def hopeless(load: Load, fates: Sequence[Fate], now: float) -> bool:
    """Whether more requests have missed a limit than may; one whose first token is late has."""
    if load.allowed is None:
        return False
    missed = sum(
        not fate.good(load.ttft, load.tpot) if fate.ended else fate.first is None and now - fate.due > load.ttft
        for fate in fates
    )
    return missed > load.allowed
