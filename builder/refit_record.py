"""What an engine built with `--refit` remembers of its weights: how each is made of those of a Checkpoint.

refit.onnx (refit.WORD.onnx beside rank0.WORD.engine): a graph of the expressions alone, without weights

    node       of an expression, e.g. Concat(q, k, v)
    metadata   uses     weight of the engine → tensor of this graph, and how it is packed
               weights  weight of the Checkpoint → type and sizes
               constants, nodes    hashes of the rest of the Checkpoint's graph, which passes have made the plan of
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from ingot.builder.expressions import check_sources
from ingot.builder.graph import producer
from ingot.builder.pack import WeightUse
from ingot.builder.plan_targets import TargetBuild
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType
from ingot.errors import REBUILD, BuildError, EngineError, UsageError

_KEY = "ingot.refit"
_AGAIN = "build an engine of this Checkpoint: ingot build --refit"


def record_name(files: str) -> str:
    """files: as in `ingot.manifest.TargetEntry`."""
    return f"refit.{files}.onnx" if files else "refit.onnx"


def require_refittable(builds: Sequence[TargetBuild]) -> None:
    """Raise UsageError where more than the weights' bytes would follow from the weights."""
    for each in builds:
        if each.activation_errors:
            raise UsageError(
                "--refit cannot be combined with --activations auto: new weights could need another plan",
                where="--refit",
                expected="--activations int8, bf16 or f32",
                got="--activations auto",
                hint="add --activations int8, bf16 or f32",
            )
        if len(each.ranks) > 1:
            raise UsageError(
                "--refit cannot be combined with --tp_size or --pp_size",
                where="--refit",
                expected="one rank",
                got=f"{len(each.ranks)} ranks",
                hint="leave --refit out, or --tp_size and --pp_size",
            )
        if each.target.on_gpu or each.graph is not None:
            raise UsageError(
                f"--refit is not supported on {each.target.name}",
                where="--refit",
                expected="CPU targets and ref",
                got=f"{each.target.name}, whose compiled code may hold weights",
                hint="leave --refit out, or build for a CPU target",
            )


def make_record(uses: Sequence[WeightUse], checkpoint: Checkpoint) -> bytes:
    """The file. Raises BuildError for a weight that is made in more ways than expressions say."""
    names: dict[str, str] = {}
    direct: list[gs.Node] = []
    nodes: dict[int, gs.Node] = {}
    for use in uses:
        if use.made is not None:
            raise BuildError(
                "--refit cannot be combined with --screen_lm_head", hint="leave --screen_lm_head or --refit out"
            )
        tensor = use.tensor
        if isinstance(tensor, gs.Constant):  # one that no node reads would not be in the file
            direct.append(gs.Node(op="Identity", inputs=[tensor], outputs=[gs.Variable(f"ingot.refit/{use.name}")]))
        names[use.name] = tensor.name
        _collect(tensor, nodes)
    graph = gs.Graph(nodes=[*nodes.values(), *direct], inputs=[], outputs=[], opset=26)
    model = gs.export_onnx(graph, do_type_check=False)
    for node in direct:
        node.inputs.clear()
    for each in model.graph.initializer:
        del each.external_data[:]
    facts = {**_facts(checkpoint.graph_path), "uses": {use.name: [names[use.name], _packing(use)] for use in uses}}
    model.metadata_props.add(key=_KEY, value=json.dumps(facts, sort_keys=True))
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def read_record(path: Path, checkpoint: Checkpoint) -> list[WeightUse]:
    """The weights of an engine, made of another Checkpoint's.

    Raises EngineError for a file that is none, BuildError where the Checkpoint's model is another one.
    """
    model = onnx.load(path, load_external_data=False)
    text = next((each.value for each in model.metadata_props if each.key == _KEY), None)
    if text is None:
        raise EngineError("the record of weights cannot be read", where=str(path), hint=REBUILD)
    facts = json.loads(text)
    _require_same(facts, _facts(checkpoint.graph_path), checkpoint)
    stored = onnx.load(checkpoint.graph_path, load_external_data=False).graph.initializer
    places = {each.name: each.external_data for each in stored if _is_external(each)}
    for each in model.graph.initializer:
        if _is_external(each):
            each.external_data.extend(places[each.name])
    tensors = gs.import_onnx(model).tensors()
    found = []
    for name, (tensor, packing) in facts["uses"].items():
        dtype, shape = DType(packing.pop("dtype")), tuple(packing.pop("shape"))
        use = WeightUse(name=name, tensor=tensors[tensor], dtype=dtype, shape=shape, **packing)
        check_sources(use.tensor, checkpoint)
        found.append(use)
    return found


def _collect(tensor: gs.Tensor, nodes: dict[int, gs.Node]) -> None:
    """Nodes of an expression, those that others need first."""
    node = producer(tensor)
    if node is None or id(node) in nodes:
        return
    for each in node.inputs:
        _collect(each, nodes)
    nodes[id(node)] = node


def _packing(use: WeightUse) -> dict[str, Any]:
    return {
        "dtype": use.dtype.value,
        "shape": list(use.shape),
        "panels": use.panels,
        "gated": use.gated,
        "group": use.group,
    }


def _is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _facts(path: Path) -> dict[str, Any]:
    """What must be the same in two Checkpoints for one plan."""
    graph = onnx.load(path, load_external_data=False).graph
    weights, constants = {}, {}
    for each in graph.initializer:
        if _is_external(each):
            dtype = DType.from_onnx(each.data_type)
            kind = onnx.TensorProto.DataType.Name(each.data_type).lower() if dtype is None else dtype.value
            weights[each.name] = [kind, list(each.dims)]
        else:
            constants[each.name] = hashlib.sha256(each.SerializeToString(deterministic=True)).hexdigest()
    nodes = hashlib.sha256(b"".join(each.SerializeToString(deterministic=True) for each in graph.node)).hexdigest()
    return {"weights": weights, "constants": constants, "nodes": nodes}


def _require_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise BuildError with the first thing in which the new Checkpoint differs."""
    for what, expected, got in _differences(ours, theirs):
        raise BuildError(
            f"the Checkpoint does not fit the engine: {what}",
            where=str(checkpoint.graph_path),
            expected=expected,
            got=got,
            hint=_AGAIN,
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    def said(facts: Mapping[str, Any], name: str) -> str:
        kind, dims = facts["weights"].get(name, ("no such weight", ""))
        return f"{kind} {dims}".strip()

    for name in {**ours["weights"], **theirs["weights"]}:
        if said(ours, name) != said(theirs, name):
            yield f"the weight {name} is another", said(ours, name), said(theirs, name)
    for name in {**ours["constants"], **theirs["constants"]}:
        if ours["constants"].get(name) != theirs["constants"].get(name):
            yield (
                f"the constant {name} is another, and the plan was made with it",
                "the value that the engine was built with",
                "another value" if name in theirs["constants"] else "no such constant",
            )
    if ours["nodes"] != theirs["nodes"]:
        yield "it computes in another way", "the graph that the engine was built of", "another graph"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """nbytes: of new weights. notes: one sentence each: weights that are not finite."""

    output_dir: Path
    targets: tuple[str, ...]
    nbytes: int
    seconds: float
    notes: tuple[str, ...]
