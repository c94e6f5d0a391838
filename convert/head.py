"""From the last norm to the logits → nodes of the Graph."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ingot.configs.model import ModelConfig

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def head(g: Nodes, x: str, config: ModelConfig) -> str:
    """[batch, sequence, vocab]; x: behind the last norm"""
    table = g.float32("embed/weight" if config.tied_embeddings else "lm_head/weight")
    transposed = g.node("Transpose", [of_vocabulary(g, table, config, "lm_head")], "lm_head/transpose", perm=[1, 0])
    x = g.node("MatMul", [x, transposed], "lm_head/matmul")
    if config.head_bias:
        x = g.node("Add", [x, g.float32("lm_head/bias")], "lm_head/add_bias")
    if config.logit_scale != 1:
        x = g.node("Mul", [x, g.constant("const/logit_scale", np.float32(config.logit_scale))], "lm_head/scale")
    if config.logit_cap:
        cap = g.constant("const/logit_cap", np.float32(config.logit_cap))
        bent = g.node("Tanh", [g.node("Div", [x, cap], "lm_head/cap_div")], "lm_head/cap_tanh")
        x = g.node("Mul", [bent, cap], "lm_head/cap")
    return x


def of_vocabulary(g: Nodes, table: str, config: ModelConfig, path: str) -> str:
    """The rows of a table that stand for tokens"""
    if not config.stored_rows:
        return table
    bounds = [g.integers(f"rows_{at}", [at]) for at in (0, config.vocab_size)]
    return g.node("Slice", [table, *bounds, g.integers("axis_0", [0])], f"{path}/vocabulary")
