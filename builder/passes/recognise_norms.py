"""RMSNormalization, LayerNormalization, and their spellings in elementary ops → RmsNorm, LayerNorm."""

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, is_weight, optional_input, scalar, small_ints, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Either, Match, Number, Op, Pattern, W, X

_X = X("x")


def _square(x: Pattern) -> Pattern:
    return Either(Op("Pow", x, Number(value=2.0)), Op("Mul", x, x))


def _over(x: Pattern, root: Op) -> Pattern:
    """x / root, in three spellings."""
    inverse = Either(Op("Reciprocal", root), Op("Div", Number(value=1.0), root))
    return Either(Op("Div", x, root), Op("Mul", x, inverse))


_MEAN_SQUARE = Op("ReduceMean", _square(_X), name="mean")
_SCALED = _over(_X, Op("Sqrt", Op("Add", _MEAN_SQUARE, Number("eps"))))

_CENTRED = Op("Sub", _X, Op("ReduceMean", _X, name="mean"), name="centred")
_VARIANCE = Op("ReduceMean", _square(_CENTRED), name="variance")
_STANDARD = _over(_CENTRED, Op("Sqrt", Op("Add", _VARIANCE, Number("eps"))))


def _check_standard(graph: Graph, match: Match) -> str | None:
    node = match.root
    if not all(is_weight(tensor) for tensor in node.inputs[1:] if not tensor.is_empty()):
        return "its scale or bias is not a weight"
    rank_one = all(len(weight_shape(tensor)) == 1 for tensor in node.inputs[1:] if not tensor.is_empty())
    if node.attrs.get("axis", -1) not in (-1, 2) or not rank_one:
        return "it does not run over the last dimension alone"
    if len(node.outputs) > 1 and any(graph.users(tensor) for tensor in node.outputs[1:]):
        return "its mean or deviation is used elsewhere"
    return None


def _rewrite_standard(graph: Graph, match: Match) -> None:
    node = match.root
    eps = float(node.attrs.get("epsilon", 1e-5))
    x, weight = node.inputs[:2]
    if node.op == "RMSNormalization":
        graph.replace(match.output, "RmsNorm", [x, weight], {"eps": eps})
    else:
        graph.replace(match.output, "LayerNorm", [x, weight, optional_input(node, 2)], {"eps": eps})


def _check_spelled(graph: Graph, match: Match) -> str | None:
    if len(weight_shape(match["weight"])) != 1:
        return "its scale is not a vector"
    for name in ("mean", "variance"):
        mean = match.bindings.get(name)
        if isinstance(mean, gs.Node) and not _over_last(mean):
            return "its mean does not run over the last dimension alone"
    return None


def _over_last(mean: gs.Node) -> bool:
    """Whether a ReduceMean keeps all dimensions and runs over the last; axes are an attribute or an input."""
    axes = mean.attrs.get("axes", small_ints(optional_input(mean, 1)))
    return axes in ([-1], [2]) and mean.attrs.get("keepdims", 1) == 1


def _rewrite_rms(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "RmsNorm", [match["x"], match["weight"]], {"eps": _eps(match)})


def _rewrite_layer(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "LayerNorm", [match["x"], match["weight"]], {"eps": _eps(match)})


def _eps(match: Match) -> float:
    eps = scalar(match["eps"])
    assert eps is not None, "the pattern asks for a number"
    return eps


def _check_bias(graph: Graph, match: Match) -> str | None:
    norm = match["norm"]
    if len(norm.inputs) > 2 or graph.users(norm.outputs[0]) > 1:
        return "the norm has a bias already or is used without this one"
    return None if weight_shape(match["bias"]) == weight_shape(norm.inputs[1]) else "the bias is not a vector"


def _rewrite_bias(graph: Graph, match: Match) -> None:
    norm = match["norm"]
    graph.replace(match.output, "LayerNorm", [*norm.inputs[:2], match["bias"]], dict(norm.attrs))


_NORM = Op("LayerNorm", _X, W("weight"), name="norm", domain=DOMAIN)

PASS = Fusion(
    name="recognise_norms",
    rules=[
        Rule(pattern=Op("RMSNormalization", _X, W("scale")), check=_check_standard, rewrite=_rewrite_standard),
        Rule(pattern=Op("LayerNormalization", _X, W("scale")), check=_check_standard, rewrite=_rewrite_standard),
        # before the next: a centred x / root is an RMS norm too
        Rule(pattern=Op("Mul", _STANDARD, W("weight")), check=_check_spelled, rewrite=_rewrite_layer),
        Rule(pattern=Op("Mul", _SCALED, W("weight")), check=_check_spelled, rewrite=_rewrite_rms),
        Rule(pattern=Op("Add", _NORM, W("bias")), check=_check_bias, rewrite=_rewrite_bias),
    ],
)
