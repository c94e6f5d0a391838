"""A mixed load on an engine that is driven step by step within its own process, and needs no server.

Imported in every engine's environment: nothing but the standard library.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from tests.peers.load import WARMING, Fate, Load, Run, hopeless


class Stepping(Protocol):
    """What it takes of an engine."""

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        """A request that generates exactly so many tokens, greedily."""

    def step(self) -> Mapping[int, int]:
        """Compute; how many tokens each request has got by that."""


def run_load(engine: Stepping, load: Load) -> Run:
    """Requests that are due come between two steps; a token counts as soon as its step has ended."""
    prompts, tokens = WARMING
    for number, prompt in enumerate(prompts):
        _drain(engine, -1 - number, prompt, tokens)
    fates: list[Fate] = []
    running: set[int] = set()
    begin, now = time.perf_counter(), 0.0
    while (running or len(fates) < len(load.prompts)) and not hopeless(load, fates, now):
        now = time.perf_counter() - begin
        while (due := _due(load, len(fates), now if not running else None)) is not None and due <= now:
            engine.add(len(fates), load.prompts[len(fates)], load.outputs[len(fates)])
            running.add(len(fates))
            fates.append(Fate(due=due))
        if not running:
            time.sleep(max((due or now) - now, 0))
            continue
        came = engine.step()
        now = time.perf_counter() - begin
        for number, count in came.items():
            fates[number].token(now, count)
        for number in [number for number in running if fates[number].tokens >= load.outputs[number]]:
            fates[number].ended = True
            running.remove(number)
    return Run(fates=fates, complete=not running and len(fates) == len(load.prompts), seconds=now)


def _due(load: Load, number: int, idle_since: float | None) -> float | None:
    """When a request is to come, if that is known; idle_since: since when nothing runs."""
    if number == len(load.prompts):
        return None
    return idle_since if load.arrivals is None else load.arrivals[number]


def _drain(engine: Stepping, number: int, prompt: Sequence[int], tokens: int) -> None:
    """One request alone, to its end."""
    engine.add(number, prompt, tokens)
    came = 0
    while came < tokens:
        came += engine.step().get(number, 0)
