"""Networks through TensorRT's network API: computed in numpy they give the logits of `ref`; TensorRT-RTX's real builder
takes and compiles them; and all that is used of the full TensorRT is in its bindings."""

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ingot.configs.build import BuildConfig
from ingot.errors import BuildError
from ingot.plugins.ref.session import RefSession
from ingot.plugins.target import SessionOptions
from ingot.plugins.tensorrt import (
    bindings,
    builder_bindings,
    compile_on_gpu,
    configuration,
    network_api,
    plugin,
    session,
)
from ingot.plugins.tensorrt.handover import hand_over
from ingot.plugins.tensorrt.layers import check_network, computed_products, read_layers
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.lowering import OPS, lower
from ingot.plugins.tensorrt.network_api import add_network
from ingot.plugins.tensorrt.tensors import LOGITS
from tests.families import covering_families
from tests.plugins.cpu.one_step import batch_of, in_groups
from tests.plugins.gpu_families import TENSORRT_REFUSES
from tests.plugins.tensorrt.network import NumpyAttention, decided
from tests.plugins.tensorrt.numpy_network import NumpyNetwork, NumpyTrt
from tests.plugins.tensorrt.test_lowering import (
    BLOCKS,
    STEPS,
    TOLERANCE,
    Built,
    built_model,
    network_weights,
    step_arrays,
)

STUB = Path(__file__).with_name("stub")
SESSION_CLASSES = {
    "Context": "IExecutionContext",
    "TensorRtEngine": "ICudaEngine",
    "Runtime": "Runtime",
    "RuntimeConfig": "IRuntimeConfig",
}


def _compare(built: Built, precision: str) -> Counter[str]:
    """Kinds of layers."""
    attention = NumpyAttention(built.plan, BLOCKS)
    ref = RefSession(built.ref, built.section, SessionOptions(num_blocks=built.ref.in_each(BLOCKS)))
    weights, model, kinds = network_weights(built), lower(built.graph, built.plan), Counter[str]()
    for number, (lengths, tables, rows) in enumerate(STEPS):
        ids = (np.arange(sum(new for _, new in lengths), dtype=np.int32) * 7 + number) % built.plan.vocab_size
        attention.batch = batch_of(lengths, tables, rows, ids=ids, want_logits=True)
        expected = ref.run(in_groups(attention.batch, built.ref)).logits
        assert expected is not None
        network = NumpyNetwork({**weights, **step_arrays(built.plan, attention.batch)}, attention)
        add_network(NumpyTrt, network, model, lambda attributes: attributes)  # type: ignore[arg-type]
        found = network.outputs[LOGITS]
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() < TOLERANCE[precision] * np.ptp(expected)
        kinds = Counter(network.kinds)
    check_network(built.graph, kinds)
    return kinds


@pytest.mark.daily(2)
@pytest.mark.parametrize("family", covering_families(TENSORRT_REFUSES))
def test_every_family_computes_what_ref_does(family: str, tmp_path: Path) -> None:
    _compare(built_model(tmp_path, family, "f32"), "f32")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sixteen_bits(family: str, tmp_path: Path) -> None:
    _compare(built_model(tmp_path, family, "bf16"), "bf16")


def test_every_op_of_the_lowering_has_a_layer() -> None:
    assert set(network_api._NODES) == set(OPS)


def test_what_the_library_refuses_is_named(tmp_path: Path) -> None:
    built = built_model(tmp_path, "llama", "f32")
    network = NumpyNetwork(
        {**network_weights(built), **step_arrays(built.plan, batch_of([(0, 2)], [[1]], [1]))}, _never
    )
    network.add_gather = lambda *given: None  # type: ignore[method-assign, assignment]
    with pytest.raises(BuildError, match=r"does not accept a layer(.|\n)*embed/rows"):
        add_network(NumpyTrt, network, lower(built.graph, built.plan), lambda attributes: attributes)  # type: ignore[arg-type]
    node = onnx.helper.make_node("Erf", ["ids"], ["y"], name="strange")
    model = lower(built.graph, built.plan)
    model.graph.node.insert(0, node)
    with pytest.raises(BuildError, match=r"no layer for an op(.|\n)*strange(.|\n)*Erf"):
        add_network(NumpyTrt, network, model, lambda attributes: attributes)  # type: ignore[arg-type]


def _never(plugin: Any, given: Any) -> Any:
    raise AssertionError


@pytest.mark.tensorrt
@pytest.mark.parametrize(("family", "precision"), [("gemma2", "bf16"), ("gpt2", "f32")])
def test_a_real_builder_compiles_every_other_layer(
    library: Library, family: str, precision: str, tmp_path: Path
) -> None:
    """TensorRT-RTX has the same network API but for plugins. Both norms, gates, soft caps, biases, casts."""
    checkpoint = built_model(tmp_path, family, "f32").checkpoint
    config = BuildConfig(target="tensorrt/sm89", precision=precision, max_num_tokens=64, dry_run=True)
    graph, plan = decided(config, checkpoint)
    hand_over(graph, plan, tmp_path)
    script = Path(__file__).with_name("rtx_network_api.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["errors"] == []
    assert report["bytes"] > 1 << 20
    assert len(set(report["names"])) == len(report["names"]), "every layer has a name of its own"
    layers = read_layers(report["log"])
    products = [node.name for node in graph.of("Matmul")]
    for profile in (0, 1):
        found = computed_products(graph, layers, profile)
        assert found == products, "through all fusions, layers say which nodes they compute"


def _surface(paths: list[list[str]], folder: Path) -> list[str | None]:
    """Documentation of what the bindings have, None for what they have not; they are read by another process, where the
    core library is a stub."""
    try:
        version = metadata.version("tensorrt-cu13-bindings")
    except metadata.PackageNotFoundError:
        pytest.skip("this machine lacks tensorrt-cu13-bindings")
    if shutil.which("g++") is None:
        pytest.skip("this machine lacks a C++ compiler")
    for name in ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser"):
        file = f"{name}.so.{version.split('.')[0]}"
        command = ["g++", "-shared", "-fPIC", str(STUB / "nvinfer.cpp"), f"-Wl,-soname,{file}", "-o"]
        subprocess.run([*command, str(folder / file)], check=True)
    done = subprocess.run(
        [sys.executable, STUB / "surface.py"],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    answer = json.loads(done.stdout)
    assert answer["version"] == version
    found: list[str | None] = answer["found"]
    return found


def _declared(module: Any, classes: dict[str, str]) -> Iterator[tuple[list[str], list[str] | None]]:
    """(path in the bindings, names of the parameters; None for an attribute)"""
    for ours, theirs in classes.items():
        for each in getattr(module, ours).__annotations__:
            yield [theirs, each], None
        for each, method in vars(getattr(module, ours)).items():
            if inspect.isfunction(method) and each[0] != "_":
                yield [theirs, each], list(inspect.signature(method).parameters)[1:]


def test_the_bindings_have_every_declared_method(tmp_path: Path) -> None:
    """Parameters of the same names in the same order, in one of the overloads; what follows has defaults."""
    names = [name for name, kind in vars(builder_bindings).items() if inspect.isclass(kind)]
    names = [name for name in names if vars(builder_bindings)[name].__module__ == builder_bindings.__name__]
    declared = [*_declared(builder_bindings, {name: name for name in names}), *_declared(bindings, SESSION_CLASSES)]
    assert len(declared) > 40
    for (path, wanted), doc in zip(declared, _surface([path for path, _ in declared], tmp_path), strict=True):
        assert doc is not None, path
        if wanted is not None:
            overloads = re.findall(rf"{path[1]}\(self: [^,)]*(?:, )?(.*?)\) ->", doc)
            given = [re.findall(r"(?:^|, )(\w+): ", re.sub(r"<[^>]*>", "", each)) for each in overloads]
            assert any(each[: len(wanted)] == wanted for each in given), (path, given)


def test_the_bindings_have_every_name_that_is_used(tmp_path: Path) -> None:
    """trt.A.B wherever it stands in the sources, and what is chosen by its name."""
    paths = {
        tuple(chain)
        for module in (compile_on_gpu, configuration, network_api, plugin, session, bindings)
        for chain in _chains(ast.parse(Path(inspect.getsourcefile(module) or "").read_text()))
    }
    # Of TensorRT-RTX alone, and asked for there alone.
    paths -= {("EngineValidity", "INVALID"), ("DynamicShapesKernelSpecializationStrategy", "EAGER")}
    assert ("PreviewFeature", "ALIASED_PLUGIN_IO_10_03") in paths
    assert ("MatrixOperation",) in paths
    paths |= {(each,) for each in network_api._TYPES.values()}
    for kind, members in (
        ("UnaryOperation", ("SQRT",)),
        ("MatrixOperation", ("NONE", "TRANSPOSE")),
        ("ActivationType", ("SIGMOID", "TANH", "RELU", "GELU_TANH", "GELU_ERF")),
        ("ElementWiseOperation", ("SUM", "PROD", "DIV")),
        ("LayerType", ("MATRIX_MULTIPLY", "PLUGIN_V3")),
        ("PluginFieldType", ("INT32", "FLOAT32")),
        ("LayerInformationFormat", ("JSON",)),
    ):
        paths |= {(kind, member) for member in members}
    ordered = sorted(paths)
    found = _surface([list(path) for path in ordered], tmp_path)
    assert [path for path, doc in zip(ordered, found, strict=True) if doc is None] == []


def _chains(tree: ast.AST) -> Iterator[list[str]]:
    """["A", "B"] for trt.A.B and self._trt.A.B, the longest ones."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        chain: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute) and at.attr not in ("trt", "_trt"):
            chain.insert(0, at.attr)
            at = at.value
        if chain and (isinstance(at, ast.Attribute) or (isinstance(at, ast.Name) and at.id == "trt")):
            yield chain


def test_graphs_and_plans_for_both_builders_are_alike(tmp_path: Path) -> None:
    checkpoint = built_model(tmp_path, "llama", "f32").checkpoint
    config = BuildConfig(target="tensorrt/sm89", precision="bf16", dry_run=True)
    one, other = (
        decided(dataclasses.replace(config, target=target), checkpoint)
        for target in ("tensorrt/sm89", "tensorrt-rtx/sm89")
    )
    assert one == other
