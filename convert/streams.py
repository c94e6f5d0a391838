"""Several residual streams, of which a layer computes one and predicts the others (AltUp, arXiv:2301.13310), and a
low-rank linear beside attention (LAuReL, arXiv:2411.07501) → their weights and nodes. Gemma 3n has both.

streams ─ predict: each takes something of all ─┬─────────────────────── correct: all follow what was made ─ + input
                                                └ active ─ norm ┬ attention ─ + ─ / sqrt(2) ─ MLP ┘
                                                                └ narrow product ┘
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ingot.configs.model import ModelConfig, StreamsConfig
from ingot.convert.layer_input import input_branch
from ingot.tensor_file import StoredTensor

Shape = tuple[int, ...]
Attribute = int | float | str | list[int]

LEAST_SQUARE = 1e-5  # of a stream, where it gets the magnitude of another one


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    weights: Mapping[str, StoredTensor]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str) -> str: ...

    def activated(self, x: str, path: str) -> str: ...

    def norm(self, x: str, path: str) -> str: ...

    def attention(self, x: str, layer: int, positions: str) -> str: ...

    def mlp_branch(self, x: str, normed: str, layer: int) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def stream_shapes(config: ModelConfig, path: str) -> dict[str, Shape]:
    """Weights of one layer."""
    if (streams := config.streams) is None:
        return {}
    hidden, count = config.hidden_size, streams.count
    return {
        f"{path}/streams/router/weight": (count, hidden),
        f"{path}/streams/router_norm/weight": (hidden,),
        f"{path}/streams/predict/weight": (count * count, count),
        f"{path}/streams/correct/weight": (count, count),
        **({f"{path}/input/scale/weight": (hidden,)} if streams.scaled else {}),
        f"{path}/narrow/in/weight": (streams.narrow, hidden),
        f"{path}/narrow/out/weight": (hidden, streams.narrow),
        f"{path}/narrow/norm/weight": (hidden,),
    }


def shared_stream_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Weights that make the streams of the first one, and one of them at the end."""
    if config.streams is None:
        return {}
    hidden = config.hidden_size
    return {
        f"streams/{way}/{i}/weight": (hidden, hidden) for way in ("in", "out") for i in range(1, config.streams.count)
    }


def as_streams(g: Nodes, x: str, config: ModelConfig) -> str:
    """[batch, sequence, hidden] → [batch, sequence, streams * hidden]"""
    stored = [g.float32(f"streams/in/{i}/weight") for i in range(1, _of(config).count)]
    together = g.node("Concat", stored, "streams/in/stacked", axis=0)
    made = g.node(
        "MatMul", [x, g.node("Transpose", [together], "streams/in/transpose", perm=[1, 0])], "streams/in/matmul"
    )
    others = _matched(g, made, x, config.hidden_size, _of(config).count - 1, "streams/in")
    return g.node("Concat", [x, others], "streams/joined", axis=-1)


def of_streams(g: Nodes, x: str, config: ModelConfig) -> str:
    """[batch, sequence, streams * hidden] → [batch, sequence, hidden]: the mean of the first stream and of linears of
    the others, which are scaled to the first one's RMS"""
    count, hidden = _of(config).count, config.hidden_size
    split = _split(g, x, count, hidden, "streams/last")
    total = first = _one(g, split, 0, "streams/last/0")
    for i in range(1, count):
        path = f"streams/out/{i}"
        narrow = g.linear(_one(g, split, i, f"streams/last/{i}"), path)
        total = g.node("Add", [total, _matched(g, narrow, first, hidden, 1, path)], f"{path}/sum")
    return g.node("Mul", [total, g.constant("const/streams", np.float32(1 / count))], "streams/mean")


def layer_of_streams(g: Nodes, x: str, config: ModelConfig, layer: int, positions: str, embedding: str) -> str:
    """[batch, sequence, streams * hidden]; embedding: of the tokens, scaled"""
    path = f"layers.{layer}"
    ahead, active = predicted(g, x, config, path)
    normed = g.norm(active, f"{path}/attn_norm")
    narrow = narrow_branch(g, normed, path)
    branch = g.norm(g.attention(normed, layer, positions), f"{path}/attn_post_norm")
    both = g.node("Add", [g.node("Add", [active, branch], f"{path}/attn/residual"), narrow], f"{path}/both")
    x = g.node("Mul", [both, g.constant("const/half", np.float32(2**-0.5))], f"{path}/both/scaled")
    made = g.mlp_branch(x, g.norm(x, f"{path}/mlp_norm"), layer)
    behind, computed = corrected(g, ahead, active, made, config, path)
    return with_branch(g, behind, input_branch(g, computed, embedding, config, layer), config, path)


def predicted(g: Nodes, x: str, config: ModelConfig, path: str) -> tuple[str, str]:
    """Each stream plus a learned mix of all streams. Returns (all streams, the one that the layer computes)."""
    streams, hidden, path = _of(config), config.hidden_size, f"{path}/streams"
    split = _split(g, x, streams.count, hidden, f"{path}/given")
    given = _one(g, split, streams.active, f"{path}/given/active")
    coefs = g.linear(_shares(g, given, config, path, "given"), f"{path}/predict")
    square = g.integers(f"streams_{streams.count}", [0, 0, streams.count, streams.count])
    matrix = g.node("Reshape", [coefs, square], f"{path}/matrix")
    mixed = g.node("Add", [split, g.node("MatMul", [matrix, split], f"{path}/mixed")], f"{path}/predicted")
    flat = _joined(g, mixed, streams.count, hidden, f"{path}/predicted")
    return flat, _one(g, _split(g, flat, streams.count, hidden, f"{path}/predicted"), streams.active, f"{path}/active")


def corrected(g: Nodes, x: str, active: str, made: str, config: ModelConfig, path: str) -> tuple[str, str]:
    """Each predicted stream in x plus a learned share of (made - active), the error of the active stream's prediction.
    Returns (all streams, the active one)."""
    streams, hidden, path = _of(config), config.hidden_size, f"{path}/streams"
    split = _split(g, x, streams.count, hidden, f"{path}/ahead")
    coefs = g.linear(_shares(g, made, config, path, "made"), f"{path}/correct")
    more = g.node("Add", [coefs, g.constant("const/stream_one", np.float32(1))], f"{path}/correct/add_one")
    column = g.node("Unsqueeze", [more, g.integers("axis_last", [-1])], f"{path}/correct/column")
    apart = g.node("Sub", [made, active], f"{path}/apart")
    row = g.node("Unsqueeze", [apart, g.integers("axis_2", [2])], f"{path}/apart/row")
    total = g.node("Add", [split, g.node("Mul", [row, column], f"{path}/followed")], f"{path}/corrected")
    flat = _joined(g, total, streams.count, hidden, f"{path}/corrected")
    return flat, _one(g, _split(g, flat, streams.count, hidden, f"{path}/behind"), streams.active, f"{path}/computed")


def with_branch(g: Nodes, x: str, branch: str, config: ModelConfig, path: str) -> str:
    """Adds the branch at the end of a layer to all streams but the first. Returns all streams."""
    count, hidden, path = _of(config).count, config.hidden_size, f"{path}/streams"
    others = np.ones((count, 1), np.float32)
    others[0] = 0
    row = g.node("Unsqueeze", [branch, g.integers("axis_2", [2])], f"{path}/branch/row")
    added = g.node("Mul", [row, g.constant("const/other_streams", others)], f"{path}/branch/others")
    total = g.node("Add", [_split(g, x, count, hidden, f"{path}/end"), added], f"{path}/ended")
    return _joined(g, total, count, hidden, f"{path}/ended")


def narrow_branch(g: Nodes, x: str, path: str) -> str:
    """x plus the norm of a low-rank linear of x (LAuReL)"""
    made = g.linear(g.linear(x, f"{path}/narrow/in"), f"{path}/narrow/out")
    return g.node("Add", [x, g.norm(made, f"{path}/narrow/norm")], f"{path}/narrow/sum")


def _of(config: ModelConfig) -> StreamsConfig:
    assert config.streams is not None, "the model has several streams"
    return config.streams


def _shares(g: Nodes, x: str, config: ModelConfig, path: str, of: str) -> str:
    """[batch, sequence, streams], between -1 and 1; of: what x is, for the names of nodes"""
    root = g.constant("const/stream_router", np.float32(1 / config.hidden_size))
    factor = g.node("Mul", [g.float32(f"{path}/router_norm/weight"), root], f"{path}/{of}/factor")
    normed = g.node("RMSNormalization", [x, factor], f"{path}/{of}/rms_norm", axis=-1, epsilon=config.norm_eps)
    weight = g.node("Transpose", [g.float32(f"{path}/router/weight")], f"{path}/{of}/transpose", perm=[1, 0])
    routed = g.node("MatMul", [normed, weight], f"{path}/{of}/matmul")
    one = g.constant("const/stream_one", np.float32(1))  # the bound, as that of logits
    bent = g.node("Tanh", [g.node("Div", [routed, one], f"{path}/{of}/div")], f"{path}/{of}/tanh")
    return g.node("Mul", [bent, one], f"{path}/{of}/shares")


def _matched(g: Nodes, x: str, like: str, hidden: int, count: int, path: str) -> str:
    """Streams side by side, each with the root mean square of `like`"""
    split, last = _split(g, x, count, hidden, f"{path}/streams"), g.integers("axis_last", [-1])
    squares = g.node("Mul", [split, split], f"{path}/squares")
    square = g.node("ReduceMean", [squares, last], f"{path}/square", keepdims=1)
    least = g.constant("const/least_square", np.float32(LEAST_SQUARE))
    own = g.node("Sqrt", [g.node("Max", [square, least], f"{path}/bounded")], f"{path}/magnitude")
    squares = g.node("Mul", [like, like], f"{path}/like/squares")
    wanted = g.node("Sqrt", [g.node("ReduceMean", [squares, last], f"{path}/like/square", keepdims=1)], f"{path}/like")
    column = g.node("Unsqueeze", [wanted, g.integers("axis_2", [2])], f"{path}/like/column")
    scaled = g.node("Div", [g.node("Mul", [split, column], f"{path}/raised"), own], f"{path}/matched")
    return _joined(g, scaled, count, hidden, f"{path}/matched")


def _split(g: Nodes, x: str, count: int, hidden: int, path: str) -> str:
    """[batch, sequence, streams, hidden]"""
    return g.node("Reshape", [x, g.integers(f"streams_{count}_{hidden}", [0, 0, count, hidden])], f"{path}/split")


def _joined(g: Nodes, x: str, count: int, hidden: int, path: str) -> str:
    """[batch, sequence, streams * hidden]"""
    return g.node("Reshape", [x, g.integers(f"rows_{count * hidden}", [0, 0, count * hidden])], f"{path}/joined")


def _one(g: Nodes, split: str, index: int, path: str) -> str:
    """One of the streams, [batch, sequence, hidden]"""
    return g.node("Gather", [split, g.integers(f"stream_{index}", index)], path, axis=2)
