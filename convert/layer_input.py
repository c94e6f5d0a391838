"""A branch at the end of each layer, with an embedding of the token of the layer's own → its weights and nodes.

ids ─ Gather of the layer's columns ─ * sqrt(width / 2) ┐
e ─── the layer's rows of `project` ─ norm / sqrt(2) ── Add ┐
x ┬─ gate ─ activation ──────────────────────────────────── Mul ─ out ─ norm ┐
  └───────────────────────────────────────────────────────────────────────── Add

e: the embedding of the token, as the first layer gets it. Gemma 4 calls this per-layer inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ingot.configs.model import ModelConfig
from ingot.dtypes import to_float32
from ingot.tensor_file import StoredTensor, read_rows

Shape = tuple[int, ...]
Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    weights: Mapping[str, StoredTensor]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str) -> str: ...

    def activated(self, x: str, path: str) -> str: ...

    def norm(self, x: str, path: str) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def shared_input_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Weights of all layers together: a table and a product with a part for each, and one norm."""
    width, hidden = config.layer_input * config.num_layers, config.hidden_size
    if not width:
        return {}
    return {
        "layer_input/table/weight": (config.layer_input_rows, width),
        "layer_input/project/weight": (width, hidden),
        "layer_input/norm/weight": (config.layer_input,),
    }


def layer_input_shapes(config: ModelConfig, path: str) -> dict[str, Shape]:
    """Weights at the end of one layer."""
    width, hidden = config.layer_input, config.hidden_size
    scale: dict[str, Shape] = {f"{path}/scale": (1,)} if config.layer_scale else {}
    if not width:
        return scale
    return {
        **scale,
        f"{path}/input/gate/weight": (width, hidden),
        f"{path}/input/out/weight": (hidden, width),
        f"{path}/input/norm/weight": (hidden,),
    }


def layer_end(g: Nodes, x: str, embedding: str, config: ModelConfig, layer: int) -> str:
    """What few models have behind the MLP; embedding: of the tokens, scaled"""
    path = f"layers.{layer}"
    if config.layer_input:
        x = g.node("Add", [x, input_branch(g, x, embedding, config, layer)], f"{path}/input/residual")
    if config.layer_scale:
        stored = g.weights[f"{path}/scale"]
        scale = g.constant(f"{path}/scale", to_float32(read_rows(stored), stored.dtype))
        x = g.node("Mul", [x, scale], f"{path}/scaled")
    return x


def input_branch(g: Nodes, x: str, embedding: str, config: ModelConfig, layer: int) -> str:
    """What the branch adds to x, [batch, sequence, hidden]."""
    path = f"layers.{layer}/input"
    if f"{path}/scale/weight" in g.weights:  # of the columns of x
        columns = [g.float32(f"{path}/gate/weight"), g.float32(f"{path}/scale/weight")]
        transposed = g.node(
            "Transpose", [g.node("Mul", columns, f"{path}/scaled")], f"{path}/gate/transpose", perm=[1, 0]
        )
        product = g.node("MatMul", [x, transposed], f"{path}/gate/matmul")
    else:
        product = g.linear(x, f"{path}/gate")
    gate = g.activated(product, path)
    gated = g.node("Mul", [gate, _input(g, embedding, config, layer)], f"{path}/gated")
    return g.norm(g.linear(gated, f"{path}/out"), f"{path}/norm")


def _input(g: Nodes, embedding: str, config: ModelConfig, layer: int) -> str:
    """[batch, sequence, width]. The product's factor hidden^-1/2 is in the norm's epsilon, the sum's 2^-1/2 in both
    summands."""
    path, width = f"layers.{layer}/input", config.layer_input
    table = _part(g, "layer_input/table/weight", config, layer, 1)
    rows = g.node("Gather", [table, "input_ids"], f"{path}/gather", axis=0)
    scale = g.constant("const/layer_input_scale", np.float32((width / 2) ** 0.5))
    row = g.node("Mul", [rows, scale], f"{path}/gather_scaled")
    matrix = _part(g, "layer_input/project/weight", config, layer, 0)
    transposed = g.node("Transpose", [matrix], f"{path}/project/transpose", perm=[1, 0])
    product = g.node("MatMul", [embedding, transposed], f"{path}/project/matmul")
    half = g.constant("const/layer_input_half", np.float32(2**-0.5))
    factor = g.node("Mul", [g.float32("layer_input/norm/weight"), half], f"{path}/project/factor")
    epsilon = config.norm_eps * config.hidden_size
    normed = g.node("RMSNormalization", [product, factor], f"{path}/project/rms_norm", axis=-1, epsilon=epsilon)
    return g.node("Add", [normed, row], f"{path}/sum")


def _part(g: Nodes, weight: str, config: ModelConfig, layer: int, axis: int) -> str:
    """The layer's columns or rows of a weight."""
    begin = config.layer_input * layer
    bounds = [g.integers(f"place_{at}", [at]) for at in (begin, begin + config.layer_input)]
    inputs = [g.float32(weight), *bounds, g.integers(f"axis_{axis}", [axis])]
    return g.node("Slice", inputs, f"layers.{layer}/input/{weight.split('/')[1]}_part")
