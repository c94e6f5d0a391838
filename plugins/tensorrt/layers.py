"""What the builder made of a network: its layers, as its log or the library's inspector lists them, compared with the
graph.

A layer whose results nobody reads is dropped without a word, and a pool that cannot be updated in place is copied, so
both are looked for: an engine is written only if each product, norm, table and attention of the graph is there in every
profile, and nothing but the attention touches the pools.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ingot.errors import BuildError
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.tensorrt.attention import PLUGIN
from ingot.plugins.tensorrt.tensors import LOGITS, PROFILES, UPDATED, pool_names, product_node

MOVES = ("NoOp", "Reformat", "shape_call")  # kinds of layers that compute nothing
PLUGIN_KIND = "PluginV3"
COPIED = "the engine copies the pools of keys and values instead of writing to them in place"

_REPORT = "build for a cuda or CPU target; report this as a bug, with TensorRT's lines above and `ingot doctor --all`"
_COPIES = "Inserting copy"  # "... before plugin layers.0/attention due to I/O aliasing by the plugin"

NODE = "[ONNX Layer: {}]"  # how a parser marks layers, and `network_api.py` too: builders keep it through all fusions
_TENSOR = re.compile(r"\{ Name: (.+?), (?:Location|Dimensions): ")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_PROFILE = re.compile(r" \[profile (\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """kind: as the builder calls it, e.g. gemm; inputs, outputs: names of tensors; nodes: of the network, that it
    computes; profile: its number."""

    name: str
    kind: str
    profile: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]


def read_layers(log: str) -> list[Layer]:
    """The layers of the engine that a log of the builder lists, profile by profile: most layers but the first profile's
    say which is theirs, the others are of the last one that was named."""
    found: list[Layer] = []
    profile = 0
    for line in log.splitlines():
        if not line.startswith("Name: ") or ", LayerType: " not in line:
            continue
        name, rest = line.removeprefix("Name: ").split(", LayerType: ", 1)
        kind, rest = rest.split(", Inputs: ", 1)
        given, rest = rest.split(", Outputs: ", 1)
        made, _, metadata = rest.partition(", Metadata: ")
        profile = _profile_of(line, profile)
        found.append(_layer(name, kind, profile, _TENSOR.findall(given), _TENSOR.findall(made), metadata))
    return found


def inspected_layers(text: str) -> list[Layer]:
    """The same of what an engine inspector says, as JSON. Raises BuildError where it says less."""
    found: list[Layer] = []
    profile = 0
    try:
        for each in json.loads(text)["Layers"]:
            profile = _profile_of(json.dumps(each), profile)
            given = [tensor["Name"] for tensor in (*each["Inputs"], *each.get("Constants", ()))]
            made = [tensor["Name"] for tensor in each["Outputs"]]
            found.append(_layer(each["Name"], each["LayerType"], profile, given, made, each.get("Metadata") or ""))
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(
            "the layers of the engine cannot be read back",
            expected="a list with names, types, inputs and outputs",
            got=f"{type(error).__name__}: {error} in {text[:200]}",
            hint="install a version of TensorRT that `ingot doctor --all` names, and report this as a bug of ingot",
        ) from error
    return found


def _profile_of(said: str, before: int) -> int:
    named = _PROFILE.search(said)
    return before if named is None else int(named[1])


def _layer(name: str, kind: str, profile: int, inputs: Sequence[str], outputs: Sequence[str], metadata: str) -> Layer:
    nodes = dict.fromkeys(_without_profile(each) for each in _NODE.findall(metadata))
    return Layer(
        name=_without_profile(name),
        kind=kind,
        profile=profile,
        inputs=tuple(map(_without_profile, inputs)),
        outputs=tuple(map(_without_profile, outputs)),
        nodes=tuple(nodes),
    )


def _without_profile(name: str) -> str:
    return _PROFILE.sub("", name)


def counts(layers: Iterable[Layer]) -> Mapping[str, int]:
    """Kind → how many."""
    return dict(sorted(Counter(layer.kind for layer in layers).items()))


def computed_products(graph: OpGraph, layers: Iterable[Layer], profile: int) -> list[str]:
    """Products of the graph that a layer of the profile computes."""
    nodes = {node for each in layers if each.profile == profile and each.kind not in MOVES for node in each.nodes}
    return [product.name for product in graph.of("Matmul") if product_node(product.name) in nodes]


def expected_network(graph: OpGraph) -> Mapping[str, int]:
    """What the parsed network must hold: a layer for every product, and a plugin for every attention."""
    ops = Counter(node.op for node in graph.nodes)
    return {"MATRIX_MULTIPLY": ops["Matmul"], "PLUGIN_V3": ops["PagedAttention"]}


def check_log(log: str) -> None:
    """Raise BuildError where the builder says that it copies what a plugin updates in place."""
    if copies := [line for line in log.splitlines() if line.startswith("WARNING") and _COPIES in line]:
        raise BuildError(COPIED, expected="a log without such a warning", got="; ".join(copies), hint=_REPORT)


def check_network(graph: OpGraph, network: Mapping[str, int]) -> None:
    """Hold the layers of the parsed network against the graph. Raises BuildError."""
    for kind, expected in expected_network(graph).items():
        if network.get(kind, 0) != expected:
            raise BuildError(
                "TensorRT has compiled another network than the graph",
                where=kind,
                expected=f"{expected} layers",
                got=str(network.get(kind, 0)),
                hint=_REPORT,
            )


def check_layers(graph: OpGraph, layers: Sequence[Layer]) -> None:
    """Hold the layers of the engine against the graph. Raises BuildError that names what is missing or too much."""
    products = [product.name for product in graph.of("Matmul")]
    for number, profile in enumerate(PROFILES):
        found = computed_products(graph, layers, number)
        if hollow := [name for name in products if name not in found]:
            raise BuildError(
                "TensorRT built an engine without a matmul of the model",
                where=f"profile {profile}",
                expected=f"all {len(products)} matmuls of the graph",
                got=f"none for {', '.join(hollow)}",
                hint=_REPORT,
            )
        _check_profile(graph, [layer for layer in layers if layer.profile == number], profile)


def _check_profile(graph: OpGraph, layers: Sequence[Layer], where: str) -> None:
    read, made = _read_and_made(layers)
    if unread := [name for name in graph.weights() if name not in read]:
        raise BuildError(
            "TensorRT built an engine in which no layer reads some weights",
            where=f"profile {where}",
            got=", ".join(unread),
            hint=_REPORT,
        )
    if LOGITS not in made:
        raise BuildError(
            "TensorRT built an engine in which no layer computes the logits", where=f"profile {where}", hint=_REPORT
        )
    _check_pools(graph, layers, where)


def _read_and_made(layers: Sequence[Layer]) -> tuple[set[str], set[str]]:
    """Tensors that computing layers read and make, also where layers that only move them lie between."""
    computing = [layer for layer in layers if layer.kind not in MOVES]
    moving = [layer for layer in layers if layer.kind in MOVES]
    read = {name for layer in computing for name in layer.inputs}
    made = {name for layer in computing for name in layer.outputs}
    for layer in reversed(moving):
        read |= set(layer.inputs) if read & set(layer.outputs) else set()
    for layer in moving:
        made |= set(layer.outputs) if made & set(layer.inputs) else set()
    return read, made


def _check_pools(graph: OpGraph, layers: Sequence[Layer], where: str) -> None:
    attentions = [node.name for node in graph.of("PagedAttention")]
    pools = [name for node in graph.of("PagedAttention") for name in pool_names(int(node.attrs["layer"]))]
    names = {*pools, *(name + UPDATED for name in pools)}
    plugins = [layer for layer in layers if layer.kind == PLUGIN_KIND]
    if sorted(node for layer in plugins for node in layer.nodes) != sorted(attentions):
        raise BuildError(
            f"the engine does not hold one {PLUGIN} per layer",
            where=f"profile {where}",
            expected=", ".join(attentions),
            got=", ".join(layer.name for layer in plugins) or "none",
            hint=_REPORT,
        )
    direct = {name for layer in plugins for name in (*layer.inputs, *layer.outputs)}
    others = [layer for layer in layers if layer.kind != PLUGIN_KIND and names & {*layer.inputs, *layer.outputs}]
    if others or not names <= direct:
        raise BuildError(
            COPIED,
            where=f"profile {where}",
            expected="pools that only the attention reads and writes",
            got=", ".join(layer.name for layer in others) or f"no attention with {', '.join(sorted(names - direct))}",
            hint=_REPORT,
        )
