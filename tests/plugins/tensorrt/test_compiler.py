"""Engines that the real TensorRT-RTX builder makes here, without a GPU."""

import ctypes
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import read_manifest
from ingot.errors import BuildError
from ingot.plan import Plan
from ingot.plugins.cuda import target as cuda_target
from ingot.plugins.cuda.compiler import MachineCode
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.tensorrt import compiler, target
from ingot.plugins.tensorrt.compiler import Compiled, compile_graph
from ingot.plugins.tensorrt.handover import hand_over
from ingot.plugins.tensorrt.layers import (
    Layer,
    check_layers,
    check_log,
    check_network,
    computed_products,
    expected_network,
    inspected_layers,
    read_layers,
)
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.plan_file import read_header
from tests.e2e.command import ingot
from tests.handmade import write_model
from tests.plugins.tensorrt.network import decided

pytestmark = pytest.mark.tensorrt
SM89 = ("SM89",)


def _checkpoint(folder: Path, family: str) -> Path:
    if not (folder / "c").is_dir():
        write_model(folder / "m", dict(find_family(family).tiny))
        convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    return folder / "c"


def _decided(folder: Path, family: str, precision: str) -> tuple[OpGraph, Plan]:
    config = BuildConfig(target="tensorrt-rtx/sm89", precision=precision, dry_run=True, max_num_tokens=64)
    return decided(config, _checkpoint(folder, family))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def kept() -> dict[str, tuple[OpGraph, Plan, Compiled]]:
    return {}


@pytest.fixture
def llama(
    library: Library, folder: Path, kept: dict[str, tuple[OpGraph, Plan, Compiled]]
) -> tuple[OpGraph, Plan, Compiled]:
    """Compiled once."""
    if not kept:
        graph, plan = _decided(folder, "llama", "bf16")
        kept["llama"] = graph, plan, compile_graph(graph, plan, library, SM89)
    return kept["llama"]


def test_the_engine_holds_the_whole_graph(llama: tuple[OpGraph, Plan, Compiled]) -> None:
    """Two layers: four products in each and lm_head; the attention twice; all of that in both profiles."""
    graph, _, compiled = llama
    header = read_header(compiled.image, "rank0.plan")
    assert header.capabilities == ("8.9",)
    assert header.nbytes == len(compiled.image)
    assert expected_network(graph) == {"MATRIX_MULTIPLY": 9, "PLUGIN_V3": 2}
    assert {kind: compiled.network[kind] for kind in expected_network(graph)} == expected_network(graph)
    for profile in (0, 1):
        layers = [layer for layer in compiled.layers if layer.profile == profile]
        assert [layer.name for layer in layers if layer.kind == "PluginV3"] == [
            "layers.0/attention",
            "layers.1/attention",
        ]
        assert len(computed_products(graph, layers, profile)) == 9
        assert sum(layer.kind in ("gemm", "runtime_fusion") for layer in layers) == 9
    assert len(compiled.image) < 5 << 20, "weights are inputs"
    assert len(compiled.activation_bytes) == 2
    assert min(compiled.activation_bytes) > 0
    warnings = [line for line in compiled.log.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert warnings == []


def _without(layers: tuple[Layer, ...], node: str, profile: int) -> list[Layer]:
    return [layer for layer in layers if node not in layer.nodes or layer.profile != profile]


def test_a_hollow_engine_is_refused(llama: tuple[OpGraph, Plan, Compiled]) -> None:
    graph, _, compiled = llama
    for node, profile, word in (
        ("layers.1/down/product", 1, "none for layers.1/down"),
        ("lm_head/product", 0, "none for lm_head"),
        ("layers.0/attention_norm/norm", 0, "no layer reads some weights"),
    ):
        with pytest.raises(BuildError, match="TensorRT built an engine") as caught:
            check_layers(graph, _without(compiled.layers, node, profile))
        assert word in str(caught.value)
    with pytest.raises(BuildError, match="TensorRT has compiled another network than the graph"):
        check_network(graph, {**compiled.network, "MATRIX_MULTIPLY": 8})
    with pytest.raises(BuildError, match="one IngotAttention per layer"):
        check_layers(graph, [layer for layer in compiled.layers if layer.name != "layers.1/attention"])


def test_what_is_only_moved_is_read_and_made(llama: tuple[OpGraph, Plan, Compiled]) -> None:
    """A builder may reformat a weight before a product and the logits behind it; moving alone computes nothing."""
    graph, _, compiled = llama
    weight = next(name for name in graph.weights() if name == "layers.0/down.weight")

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple({weight: "moved", "logits": "unmoved"}.get(name, name) for name in names)

    def moves(*pairs: tuple[str, str]) -> list[Layer]:
        return [
            Layer(name="a", kind="Reformat", profile=profile, inputs=(given,), outputs=(made,), nodes=())
            for given, made in pairs
            for profile in (0, 1)
        ]

    layers = [
        dataclasses.replace(each, inputs=renamed(each.inputs), outputs=renamed(each.outputs))
        for each in compiled.layers
    ]
    with pytest.raises(BuildError, match="no layer reads some weights"):
        check_layers(graph, layers)
    with pytest.raises(BuildError, match="no layer computes the logits"):
        check_layers(graph, [*moves((weight, "moved")), *layers])
    check_layers(graph, [*moves((weight, "once"), ("once", "moved"), ("unmoved", "logits")), *layers])


def test_a_copied_pool_is_refused(llama: tuple[OpGraph, Plan, Compiled]) -> None:
    graph, _, compiled = llama
    copy = Layer(name="a copy", kind="Reformat", profile=1, inputs=("keys.1",), outputs=("other",), nodes=())
    with pytest.raises(BuildError, match="copies the pools") as caught:
        check_layers(graph, [*compiled.layers, copy])
    assert "a copy" in str(caught.value)

    def through_a_copy(layer: Layer) -> Layer:
        names = tuple("other" if name == "values.0" else name for name in layer.inputs)
        return dataclasses.replace(layer, inputs=names)

    with pytest.raises(BuildError, match=r"no attention with values\.0"):
        check_layers(graph, [through_a_copy(layer) for layer in compiled.layers])


def test_a_copy_that_the_log_tells_of_is_refused() -> None:
    check_log("VERBOSE Inserting copy/copies is not what happens\n")
    said = "WARNING Inserting copy/copies before plugin layers.0/attention due to I/O aliasing by the plugin."
    with pytest.raises(BuildError, match="copies the pools") as caught:
        check_log(f"INFO something\n{said} Performance may be impacted.\n")
    assert said in str(caught.value)


LAYERS = [
    Layer(
        name="a_myl1", kind="gemm", profile=0, inputs=("x", "w", "one"), outputs=("y",), nodes=("a/product", "a/bias")
    ),
    Layer(name="b", kind="PluginV3", profile=1, inputs=("y",), outputs=("z",), nodes=("b",)),
    Layer(name="c", kind="kgen", profile=1, inputs=(), outputs=(), nodes=()),
]


def test_lines_of_the_log_are_layers() -> None:
    log = (
        "VERBOSE Engine Layer Information:\n"
        "Name: a_myl1, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,4], Strides: [4,1] }, { Name: w, "
        "Dimensions: [4,4] }], Constants: [ { Name: one, Dimensions: [1] }], Outputs: [ { Name: y, Dimensions: [4] }], "
        "TacticName: t, StreamId: 0, Metadata: [ONNX Layer: a/product][ONNX Layer: a/bias]\n"
        "Name: b [profile 1], LayerType: PluginV3, Inputs: [ { Name: y [profile 1], Location: Device }], Outputs: "
        "[ { Name: z [profile 1], Location: Device }], Metadata: [ONNX Layer: b]\n"
        "Name: c, LayerType: kgen, Inputs: [], Outputs: [], TacticName: , StreamId: 0, Metadata: \n"
    )
    assert read_layers(log) == LAYERS


def test_what_an_inspector_says_is_layers() -> None:
    """The lines above as JSON, as the full TensorRT gives them; some versions leave out what is empty."""

    def tensors(*names: str) -> list[dict[str, object]]:
        return [{"Name": name, "Dimensions": [-1, 4], "Format/Datatype": "Float"} for name in names]

    said = [
        {
            "Name": "a_myl1",
            "LayerType": "gemm",
            "Inputs": tensors("x", "w"),
            "Constants": tensors("one"),
            "Outputs": tensors("y"),
            "Metadata": "[ONNX Layer: a/product]\x1e[ONNX Layer: a/bias]",
        },
        {
            "Name": "b [profile 1]",
            "LayerType": "PluginV3",
            "Inputs": tensors("y [profile 1]"),
            "Outputs": tensors("z [profile 1]"),
            "Metadata": "[ONNX Layer: b]",
        },
        {"Name": "c", "LayerType": "kgen", "Inputs": [], "Outputs": []},
    ]
    assert inspected_layers(json.dumps({"Layers": said, "Bindings": ["x", "x [profile 1]"]})) == LAYERS


@pytest.mark.parametrize("said", ['{"Layers": ["a", "b"]}', '{"Layers": [{"Name": "a"}]}', "no JSON", "[]", "{}"])
def test_an_inspector_that_says_less_is_an_error_in_words(said: str) -> None:
    """Names alone, as engines without detailed verbosity have them."""
    with pytest.raises(BuildError, match="layers of the engine cannot be read back"):
        inspected_layers(said)


def test_other_models_compile(library: Library, tmp_path: Path) -> None:
    """Norms of heads, windows and two bases of rotation; every second layer another kind of attention."""
    graph, plan = _decided(tmp_path, "gemma3_text", "f16")
    compiled = compile_graph(graph, plan, library, ())
    assert read_header(compiled.image, "rank0.plan").mask == 0x7E
    assert len(computed_products(graph, compiled.layers, 1)) == len(list(graph.of("Matmul")))


def test_the_parser_finds_no_library_by_its_plain_name(
    library: Library, llama: tuple[OpGraph, Plan, Compiled], tmp_path: Path
) -> None:
    """Without the folder of the link, the process says so instead of being ended by the parser."""
    with pytest.raises(OSError, match=r"libtensorrt_rtx\.so"):
        ctypes.CDLL("libtensorrt_rtx.so")
    hand_over(llama[0], llama[1], tmp_path)
    command = [sys.executable, "-m", "ingot.plugins.tensorrt.compile_here", str(tmp_path), library.module, "SM89"]
    environment = compiler._environment(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "libtensorrt_rtx.so: cannot open shared object file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_ends_is_an_error_in_words(
    library: Library, llama: tuple[OpGraph, Plan, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="cannot compile the network") as caught:
        compile_graph(llama[0], llama[1], library, ("SM75",))  # has no bf16
    assert "Cannot compile for target(s) sm75" in str(caught.value)
    monkeypatch.setattr(compiler, "_PROCESS", "tests.plugins.tensorrt.aborts")
    with pytest.raises(BuildError, match="its process was ended by SIGABRT"):
        compile_graph(llama[0], llama[1], library, SM89)


def test_the_command_line(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One call, two targets that share the weights; `inspect` reads the header. Kernels are compiled by other tests."""
    for module in (target, cuda_target):
        monkeypatch.setattr(module, "compile_kernels", lambda *options: MachineCode(image=b"\x7fELF", kernels={}))
        monkeypatch.setattr(module, "why_not", lambda architecture: None)
    engine, out = tmp_path / "engine", _checkpoint(tmp_path, "qwen3")
    ingot(
        "build",
        "--checkpoint_dir",
        out,
        "--output_dir",
        engine,
        "--target",
        "tensorrt-rtx/sm89,cuda/sm89",
        "--precision",
        "f32",
    ).succeeds()
    assert [part.name for part in read_manifest(engine).parts if part.name.startswith("rank0")] == [
        "rank0.engine",
        "rank0.plan",
        "rank0.plan.json",
    ]
    inspected = json.loads(ingot("inspect", engine, "--json").succeeds().out)
    rtx, cuda = inspected["targets"]
    assert rtx["file"] == cuda["file"] == "rank0.engine"
    assert rtx["code"] == cuda["code"], "the same machine code lies there once"
    assert "network" not in cuda
    assert rtx["network"]["capabilities"] == ["8.9"]
    assert rtx["network"]["mask"] == 8
    assert rtx["network"]["bytes"] == (engine / "rank0.plan").stat().st_size
    assert rtx["network"]["products"] == {"mixed": 9, "decode": 9}
    assert rtx["network"]["profiles"]["decode"]["prefill"] == [0, 0, 0]
    ingot("verify", engine).succeeds()
    text = ingot("inspect", engine, "--all").succeeds().out
    assert "for GPUs of 8.9 (mask 0x08), 9/9 products" in text
    for name, place, byte, words in (
        ("rank0.plan", 32, 0x7E, ("header of the TensorRT engine is not the one", "8.0, 8.6, 8.9, 12.0, 12.1, newer")),
        ("rank0.plan", 25, 8, ("header of the TensorRT engine is not the one", "expected: ", "by 1.8.")),
        ("rank0.plan", 16, 0, ("header of the TensorRT engine is not the one",)),
        ("rank0.plan", 0, 0, ("this is not a TensorRT-RTX engine",)),
        ("rank0.plan.json", 0, ord("["), ("the engine is damaged: SHA-256 differs", "rank0.plan.json")),
    ):
        whole = (engine / name).read_bytes()
        (engine / name).write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        ingot("inspect", engine).fails(*words)
        ingot("verify", engine).fails("SHA-256 differs", name)
        (engine / name).write_bytes(whole)
    ingot("inspect", engine).succeeds()
