"""Several residual streams side by side: what mixes them, takes one out, or adds to them → MixStreams, TakeColumns,
AddToStreams, MatchMagnitude; and gates that are cut off → CutBelow. `convert/streams.py` writes these nodes.

x ─ Reshape [0, 0, streams, n] ─ ... ─ Reshape [0, 0, streams * n]
"""

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import Attr, Graph, is_op, optional_input, ours, producer, scalar, small_ints
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Number, Op, W, X


def _split(tensor: gs.Tensor) -> tuple[gs.Tensor, int, int] | None:
    """(streams side by side, how many, how wide each is) of [batch, sequence, streams, n]"""
    node = producer(tensor)
    shape = small_ints(node.inputs[1]) if is_op(node, "Reshape") and node is not None else None
    if node is None or shape is None or len(shape) != 4 or shape[:2] != [0, 0] or min(shape[2:]) < 1:
        return None
    return node.inputs[0], shape[2], shape[3]


def _joined(match: Match, tensor: gs.Tensor) -> tuple[gs.Tensor, int, int] | None:
    """`_split`, or None where the root does not put the streams side by side again."""
    found = _split(tensor)
    joined = found is not None and small_ints(match.root.inputs[1]) == [0, 0, found[1] * found[2]]
    return found if joined else None


def _last(node: gs.Node, *, keeps: bool = True) -> bool:
    """Whether a ReduceMean runs over the last dimension, and keeps it."""
    return small_ints(optional_input(node, 1)) == [-1] and bool(node.attrs.get("keepdims", 1)) == keeps


def _check_take(graph: Graph, match: Match) -> str | None:
    index, found = scalar(match.root.inputs[1]), _split(match["x"])
    if match.root.attrs.get("axis", 0) != 2 or index is None or match.root.inputs[1].shape or found is None:
        return "Gather does not take one of several streams"
    return None if 0 <= index < found[1] else f"stream {index:g} does not exist: there are {found[1]}, from 0 on"


def _rewrite_take(graph: Graph, match: Match) -> None:
    found, index = _split(match["x"]), int(scalar(match.root.inputs[1]) or 0)
    assert found is not None, "check has read it"
    attrs: dict[str, Attr] = {"of": found[1] * found[2], "first": index * found[2], "count": found[2]}
    graph.replace(match.output, "TakeColumns", [found[0]], attrs)


def _check_mix(graph: Graph, match: Match) -> str | None:
    found, coefs = _joined(match, match["x"]), _split(match["matrix"])
    if found is None or coefs is None or coefs[1:] != (found[1], found[1]):
        return "what is added to the streams is not a matrix times the streams"
    return None


def _rewrite_mix(graph: Graph, match: Match) -> None:
    found, coefs = _joined(match, match["x"]), _split(match["matrix"])
    assert found is not None, "check has read it"
    assert coefs is not None, "check has read it"
    graph.replace(match.output, "MixStreams", [found[0], coefs[0]], {"streams": found[1]})


def _active(found: tuple[gs.Tensor, int, int], tensor: gs.Tensor) -> int | None:
    """Which stream a tensor is, or None."""
    node = producer(tensor)
    if node is None or not ours(node, "TakeColumns") or node.inputs[0] is not found[0]:
        return None
    of, first, count = (int(node.attrs[name]) for name in ("of", "first", "count"))
    return first // count if (of, count, first % count) == (found[1] * found[2], found[2], 0) else None


def _check_follow(graph: Graph, match: Match) -> str | None:
    found = _joined(match, match["x"])
    axes = [small_ints(match[name].inputs[1]) for name in ("row", "column")]
    if found is None or axes not in ([[2], [-1]], [[2], [3]]) or _active(found, match["active"]) is None:
        return "the added tensor is not the change of one stream"
    return None


def _rewrite_follow(graph: Graph, match: Match) -> None:
    found = _joined(match, match["x"])
    assert found is not None, "check has read it"
    attrs: dict[str, Attr] = {"streams": found[1], "active": _active(found, match["active"]) or 0}
    graph.replace(match.output, "AddToStreams", [found[0], match["made"], match["coefs"]], attrs)


def _others(tensor: gs.Tensor, count: int) -> int | None:
    """The stream whose factor is 0, where the factors of all others are 1; None for other factors."""
    values = tensor.values if isinstance(tensor, gs.Constant) else None
    if values is None or values.shape != (count, 1) or sorted(values[:, 0].tolist()) != [0.0] + [1.0] * (count - 1):
        return None
    return int(np.argmin(values[:, 0]))


def _check_branch(graph: Graph, match: Match) -> str | None:
    found = _joined(match, match["x"])
    if found is None or small_ints(match["row"].inputs[1]) != [2] or _others(match["others"], found[1]) is None:
        return "the added tensor does not go to all streams but one"
    return None


def _rewrite_branch(graph: Graph, match: Match) -> None:
    found = _joined(match, match["x"])
    assert found is not None, "check has read it"
    attrs: dict[str, Attr] = {"streams": found[1], "active": _others(match["others"], found[1]) or 0}
    graph.replace(match.output, "AddToStreams", [found[0], match["made"]], attrs)


def _check_magnitude(graph: Graph, match: Match) -> str | None:
    found = _joined(match, match["x"])
    least = [scalar(each) for each in match["bounded"].inputs if scalar(each) is not None]
    fits = found is not None and _last(match["square"]) and _last(match["like_square"]) and len(least) == 1
    return (
        None
        if fits and small_ints(match["column"].inputs[1]) == [2]
        else "the streams are not scaled to the RMS of another tensor"
    )


def _rewrite_magnitude(graph: Graph, match: Match) -> None:
    found = _joined(match, match["x"])
    assert found is not None, "check has read it"
    least = next(scalar(each) for each in match["bounded"].inputs if scalar(each) is not None)
    attrs: dict[str, Attr] = {"streams": found[1], "joins": 0, "least": least or 0.0}
    graph.replace(match.output, "MatchMagnitude", [found[0], match["like"]], attrs)


def _check_join(graph: Graph, match: Match) -> str | None:
    node = producer(match.root.inputs[-1])
    same = node is not None and ours(node, "MatchMagnitude") and node.inputs[1] is match.root.inputs[0]
    if len(match.root.inputs) != 2 or match.root.attrs.get("axis") not in (-1, 2) or not same:
        return "Concat does not join the scaled streams to the tensor that they are scaled to"
    return None if graph.users(match["others"]) == 1 else "the scaled streams have other readers"


def _rewrite_join(graph: Graph, match: Match) -> None:
    made = producer(match["others"])
    assert made is not None, "check has read it"
    graph.replace(match.output, "MatchMagnitude", made.inputs, {**made.attrs, "joins": 1})


def _check_cut(graph: Graph, match: Match) -> str | None:
    if not all(_last(match[name]) for name in ("mean", "variance")):
        return "mean and variance are not those of a row"
    return None if scalar(match["deviations"]) is not None else "the number of standard deviations is not a constant"


def _rewrite_cut(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "CutBelow", [match["x"]], {"deviations": scalar(match["deviations"]) or 0.0})


_STREAMS = X("x")
_MIXED = Op("Reshape", Op("Add", _STREAMS, Op("MatMul", X("matrix"), _STREAMS)))
_APART = Op("Unsqueeze", Op("Sub", X("made"), X("active")), name="row")
_PARTS = Op("Unsqueeze", Op("Add", X("coefs"), Number(value=1.0)), name="column")
_FOLLOWED = Op("Reshape", Op("Add", _STREAMS, Op("Mul", _APART, _PARTS)))
_ENDED = Op("Reshape", Op("Add", _STREAMS, Op("Mul", Op("Unsqueeze", X("made"), name="row"), W("others"))))
_SQUARE = Op("ReduceMean", Op("Mul", _STREAMS, _STREAMS), name="square")
_LIKE = Op("ReduceMean", Op("Mul", X("like"), X("like")), name="like_square")
_RAISED = Op("Mul", _STREAMS, Op("Unsqueeze", Op("Sqrt", _LIKE), name="column"))
_MATCHED = Op("Reshape", Op("Div", _RAISED, Op("Sqrt", Op("Max", _SQUARE, name="bounded"))))
_MEAN = Op("ReduceMean", _STREAMS, name="mean")
_CENTRED = Op("Sub", _STREAMS, _MEAN)
_WIDE = Op("Mul", Op("Sqrt", Op("ReduceMean", Op("Mul", _CENTRED, _CENTRED), name="variance")), Number("deviations"))

PASS = Fusion(
    name="insert_streams",
    rules=[
        Rule(pattern=Op("Gather", X("x")), check=_check_take, rewrite=_rewrite_take),
        Rule(pattern=_MIXED, check=_check_mix, rewrite=_rewrite_mix),
        Rule(pattern=_FOLLOWED, check=_check_follow, rewrite=_rewrite_follow),
        Rule(pattern=_ENDED, check=_check_branch, rewrite=_rewrite_branch),
        Rule(pattern=_MATCHED, check=_check_magnitude, rewrite=_rewrite_magnitude),
        Rule(pattern=Op("Concat", X("like"), X("others")), check=_check_join, rewrite=_rewrite_join),
        Rule(pattern=Op("Relu", Op("Sub", _STREAMS, Op("Add", _MEAN, _WIDE))), check=_check_cut, rewrite=_rewrite_cut),
    ],
)
