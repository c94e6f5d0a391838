"""A graph lowered to steps, before memory is planned: every value is written by one step.

Graph ─lower▶ Program ─passes of `pipeline.program_passes`▶ Program ─memory▶ Plan
"""

import dataclasses
from collections.abc import Mapping

from ingot.builder.memory import Value
from ingot.plan import Attr


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A step before memory is planned. Inputs are names of weights and of the plan's inputs, indices of values, or
    None."""

    name: str
    op: str
    kernel: str
    inputs: tuple[str | int | None, ...]
    outputs: tuple[int | None, ...]
    attrs: Mapping[str, Attr]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """steps: in execution order; values: what they write, by index; logits: the value that the last one writes, None of
    a pipeline stage that is not the last; draw_kernel: draws from them; sum_parts, decode_tokens: as of the Plan."""

    steps: tuple[Draft, ...]
    values: tuple[Value, ...]
    logits: int | None
    draw_kernel: str = ""
    sum_parts: int = 1
    decode_tokens: int = 0

    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Step → the graph's tensor behind each output, "" where there is none."""
        return {
            step.name: tuple("" if index is None else self.values[index].tensor for index in step.outputs)
            for step in self.steps
        }
