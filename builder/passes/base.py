"""What a pass is: a name, and a run over the graph that reports how often it fired and why it refused."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from ingot.builder.graph import Graph
from ingot.builder.rewrite import Match, Op, match


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """fired: rewrites done; refused: reason → how often a pattern fitted but its check said no."""

    name: str
    fired: int
    refused: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        refusals = "".join(f"; refused {count}x: {reason}" for reason, count in sorted(self.refused.items()))
        return f"{self.name}: {self.fired}{refusals}"


class Pass(Protocol):
    """One line of `pipeline.py`."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph) -> PassReport:
        """Rewrite the graph in place; leaves it sorted."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """check: why a match must stay as it is, or None; rewrite: replaces it."""

    pattern: Op
    check: Callable[[Graph, Match], str | None]
    rewrite: Callable[[Graph, Match], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion:
    """A pass made of rules, tried in order at every node, from the inputs to the logits."""

    name: str
    rules: Sequence[Rule]

    def run(self, graph: Graph) -> PassReport:
        """One sweep over the graph."""
        fired, refused = 0, Counter[str]()
        for node in graph.nodes:
            for rule in self.rules:
                found = match(rule.pattern, node) if node.outputs else None
                if found is None:
                    continue
                reason = rule.check(graph, found)
                if reason is None:
                    rule.rewrite(graph, found)
                    fired += 1
                    break
                refused[reason] += 1
        graph.sort()
        return PassReport(name=self.name, fired=fired, refused=dict(refused))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A pass without a pattern: one function over the whole graph that returns how often it changed something."""

    name: str
    apply: Callable[[Graph], int]

    def run(self, graph: Graph) -> PassReport:
        """Apply the function, then drop what nobody needs any more."""
        fired = self.apply(graph)
        graph.sort()
        return PassReport(name=self.name, fired=fired)
