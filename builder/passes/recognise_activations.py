"""x * Sigmoid(x), Swish, Gelu, Relu and its square → Activation; cap * Tanh(x / cap) → Softcap."""

from ingot.builder.graph import DOMAIN, Graph, producer, scalar
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Number, Op, X

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _always(graph: Graph, match: Match) -> str | None:
    return None


def _check_swish(graph: Graph, match: Match) -> str | None:
    alpha = match.root.attrs.get("alpha", 1.0)
    return None if alpha == 1.0 else f"a Swish with alpha {alpha} is not silu"


def _check_gelu(graph: Graph, match: Match) -> str | None:
    approximate = match.root.attrs.get("approximate", "none")
    return None if approximate in _GELU else f"a Gelu with approximate={approximate!r} is unknown"


def _rewrite(activation: str, graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Activation", [match["x"]], {"activation": activation})


def _silu(graph: Graph, match: Match) -> None:
    _rewrite("silu", graph, match)


def _gelu(graph: Graph, match: Match) -> None:
    _rewrite(_GELU[match.root.attrs.get("approximate", "none")], graph, match)


def _relu(graph: Graph, match: Match) -> None:
    _rewrite("relu", graph, match)


def _check_relu2(graph: Graph, match: Match) -> str | None:
    """The sweep goes from the inputs to the logits, so a Relu has become an Activation by now."""
    for tensor in match.root.inputs:
        node = producer(tensor)
        if node is not None and (node.attrs.get("activation") != "relu" or len(node.inputs) > 1):
            return f"the square of {node.attrs.get('activation')} is not an activation"
    return None


def _relu2(graph: Graph, match: Match) -> None:
    _rewrite("relu2", graph, match)


def _check_cap(graph: Graph, match: Match) -> str | None:
    caps = [scalar(match[name]) for name in ("cap", "factor")]
    return None if caps[0] == caps[1] and (caps[0] or 0) > 0 else f"{caps[1]} * Tanh(x / {caps[0]}) is not a cap"


def _rewrite_cap(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Softcap", [match["x"]], {"cap": scalar(match["cap"]) or 0.0})


_KEPT = Op("Activation", X("x"), domain=DOMAIN)

PASS = Fusion(
    name="recognise_activations",
    rules=[
        Rule(pattern=Op("Mul", X("x"), Op("Sigmoid", X("x"))), check=_always, rewrite=_silu),
        Rule(pattern=Op("Swish", X("x")), check=_check_swish, rewrite=_silu),
        Rule(pattern=Op("Gelu", X("x")), check=_check_gelu, rewrite=_gelu),
        Rule(pattern=Op("Relu", X("x")), check=_always, rewrite=_relu),
        Rule(pattern=Op("Mul", _KEPT, _KEPT), check=_check_relu2, rewrite=_relu2),
        Rule(pattern=Op("Pow", _KEPT, Number(value=2.0)), check=_check_relu2, rewrite=_relu2),
        Rule(
            pattern=Op("Mul", Op("Tanh", Op("Div", X("x"), Number("cap"))), Number("factor")),
            check=_check_cap,
            rewrite=_rewrite_cap,
        ),
    ],
)
