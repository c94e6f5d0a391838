"""The targets tensorrt/smXX as users meet them: what is missing in words, engines built and run on the emulated GPU
with an emulated library, exact versions, the file of times."""

import ctypes
import json
import sys
from pathlib import Path

import onnx
import pytest

from ingot.cli.console import CliConsole
from ingot.engine import open_engine, read_manifest
from ingot.errors import UsageError, install
from ingot.plan import Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.registry import find_target
from ingot.plugins.target import SelfTuning, SessionOptions
from ingot.plugins.tensorrt import full_compiler, full_library, full_target
from ingot.plugins.tensorrt.full_library import find_tensorrt
from ingot.plugins.tensorrt.full_target import TARGETS
from ingot.plugins.tensorrt.handover import hand_over, take_over
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.lowering import lower
from ingot.runtime.model_runner import ModelRunner
from tests.e2e.command import Result, ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.ops.states import GPU_OPS
from tests.plugins.tensorrt.emulated_runtime import EmulatedRuntime, EmulatedTensorRt

NAMES = ["tensorrt/sm120", "tensorrt/sm100", "tensorrt/sm90", "tensorrt/sm89", "tensorrt/sm86", "tensorrt/sm80"]
MODULE = "tests.plugins.tensorrt.emulated_builder"
LIMITS = ("--max_seq_len", 64, "--tokens_per_block", 16, "--precision", "f32")
WHEEL = "tensorrt-cu13-bindings"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    model = write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16})
    ingot("convert", "--model_dir", model, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


@pytest.fixture
def driver(gpu: ctypes.CDLL) -> ctypes.CDLL:
    """The emulated one."""
    return gpu


@pytest.fixture
def installed(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A GPU of sm_90 and a library of 11.4."""
    library = Library(name="TensorRT", version="11.4.0.106", module=MODULE, folder=Path("nowhere"))
    monkeypatch.setattr(full_target, "find_tensorrt", lambda: library)
    return library


def build(checkpoint: Path, out: Path, target: str = "tensorrt/sm90", *options: object) -> Result:
    return ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", out, "--target", target, *LIMITS, *options)


def test_every_target_has_kernels_of_the_same_ops() -> None:
    assert [target.name for target in TARGETS] == NAMES
    assert all(isinstance(target, SelfTuning) for target in TARGETS)
    for target in TARGETS:
        ops = {kernel.split(".")[0] for kernel in target.kernels()}
        assert ops == {*GPU_OPS, "sample"}


def _with_wheels(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], module: str = "json") -> None:
    monkeypatch.setattr(full_library, "_version", versions.get)
    monkeypatch.setattr(full_library, "_MODULES", (module,))
    monkeypatch.setattr(full_library, "_LIBS", "no_libs_here")


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("versions", "module", "words"),
    [
        ({}, "not_here", f"TensorRT is not installed (no Python module tensorrt); {install('tensorrt')}"),
        ({WHEEL: "10.15.1.29"}, "json", "TensorRT must be 10.16 to 11.x; here is 10.15.1.29; pip install"),
        ({WHEEL: "12.0.0.1"}, "json", "TensorRT must be 10.16 to 11.x; here is 12.0.0.1; pip install"),
        ({WHEEL: "10.16.1.11"}, "json", "libnvinfer.so.10 is not: pip install tensorrt-cu13-libs==10.16.1.11, or put"),
    ],
)
def test_build_and_doctor_say_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], module: str, words: str
) -> None:
    _with_wheels(monkeypatch, versions, module)
    assert words in str(find_tensorrt())
    build(checkpoint, tmp_path / "e").fails("this machine cannot build for tensorrt/sm90", words)
    assert not (tmp_path / "e").exists()
    build(checkpoint, tmp_path / "e", "tensorrt/sm90", "--dry_run").succeeds()
    machine = json.loads(ingot("doctor", "--json").succeeds().out)
    state = {each["name"]: each for each in machine["targets"]}["tensorrt/sm90"]
    assert not state["builds"]
    assert words in state["why_not"]
    assert words in machine["cuda"]["networks on the GPU"]


def test_the_library_in_its_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_wheels(monkeypatch, {"tensorrt-cu13": "11.2.1.2"})
    libs = tmp_path / "libs_wheel"
    libs.mkdir()
    (libs / "__init__.py").touch()
    (libs / "libnvinfer.so.11").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(full_library, "_LIBS", "libs_wheel")
    found = find_tensorrt()
    assert isinstance(found, Library)
    assert (str(found), found.folder) == ("TensorRT 11.2.1.2", libs)


def test_it_is_built_on_the_gpu_that_runs_it(
    driver: ctypes.CDLL, installed: Library, checkpoint: Path, tmp_path: Path
) -> None:
    """Another GPU, and none."""
    build(checkpoint, tmp_path / "e", "tensorrt/sm89").fails(
        "built on the GPU that runs it: tensorrt/sm89 needs a GPU of compute capability 8.9; this machine has Emulated"
    )
    driver.emulated_set_devices(0)
    build(checkpoint, tmp_path / "e").fails("built on the GPU that runs it: the NVIDIA driver shows no GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_engine_with_exact_versions(
    installed: Library, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CliConsole, "PERIOD", -1.0)  # a line for all that is said
    said = build(checkpoint, tmp_path / "e", "cuda/sm90,tensorrt/sm90").succeeds().err
    assert "compiling the network with TensorRT 11.4.0.106" in said
    assert (tmp_path / "e" / "rank0.plan").read_bytes().endswith(b"timed, whole")
    manifest = read_manifest(tmp_path / "e")
    assert manifest.of("tensorrt/sm90").built_with == {
        "TensorRT": "11.4.0.106",
        "nvcc": "13.0.0",
        "GPU": "Emulated GPU",
        "CUDA driver": "13.0",
    }
    assert manifest.of("cuda/sm90").built_with == {"nvcc": "13.0.0"}
    assert manifest.of("tensorrt/sm90").files == manifest.of("cuda/sm90").files == ""
    document = json.loads(ingot("inspect", tmp_path / "e", "--json").succeeds().out)
    network = document["targets"][1]["network"]
    assert (network["library"], network["gpu"], network["file"]) == (
        "TensorRT 11.4.0.106",
        "Emulated GPU",
        "rank0.plan",
    )
    assert network["network"]["PLUGIN_V3"] == 2
    assert network["network"]["MATRIX_MULTIPLY"] == 9
    text = ingot("inspect", tmp_path / "e", "--all").succeeds().out
    assert "by TensorRT 11.4.0.106 on Emulated GPU, for GPUs of 9.0, 9/9 products, 3 MiB for activations" in text
    assert "layers: " in text.split("profile     decode: ")[1].splitlines()[0]
    assert network["products"] == {"mixed": 9, "decode": 9}
    assert network["layers"]["decode"]["PluginV3"] == network["layers"]["mixed"]["PluginV3"] == 2
    assert network["activation_bytes"] == {"mixed": 3 << 20, "decode": 2 << 20}
    assert "built with  CUDA driver 13.0, GPU Emulated GPU, TensorRT 11.4.0.106, nvcc 13.0.0" in text
    ingot("verify", tmp_path / "e").succeeds()


FAULTS = """
from tests.plugins.tensorrt import emulated_builder
from tests.plugins.tensorrt.emulated_builder import *
from tests.plugins.tensorrt.emulated_builder import _Engine

def dropped(layers):
    node = "[ONNX Layer: layers.1/down/product]"
    return [each for each in layers if each["Metadata"] != node or "profile" not in each["Name"]]

def copied(layers):
    tensor = [{"Name": "keys.0"}]
    return [{"Name": "a copy", "LayerType": "Reformat", "Inputs": tensor, "Outputs": [{"Name": "other"}]}, *layers]

def unplugged(layers):
    return [each for each in layers if each["Metadata"] != "[ONNX Layer: layers.0/attention]"]

def unread(layers):
    return ["a name"]

class Runtime(emulated_builder.Runtime):
    def deserialize_cuda_engine(self, serialized_engine):
        said = json.loads(serialized_engine.splitlines()[0])
        if "FAULT" == "gone":
            return None
        return _Engine(json.dumps({"Layers": FAULT(said["Layers"])}))
"""


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "dropped",
            ("TensorRT built an engine without a matmul of the model", "profile decode", "none for layers.1/down"),
        ),
        ("copied", ("the engine copies the pools", "a copy")),
        ("unplugged", ("does not hold one IngotAttention per layer", "layers.1/attention")),
        ("unread", ("the layers of the engine cannot be read back",)),
        ("gone", ("cannot compile the network", "the library cannot read back the engine that it built")),
    ],
)
def test_what_the_builder_made_is_read_back(
    fault: str,
    words: tuple[str, ...],
    driver: ctypes.CDLL,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checks of TensorRT-RTX's engines, on what the inspector says."""
    (tmp_path / "faulty_builder.py").write_text(FAULTS.replace("FAULT", fault))
    monkeypatch.syspath_prepend(tmp_path)
    library = Library(name="TensorRT", version="11.4.0.106", module="faulty_builder", folder=Path("nowhere"))
    monkeypatch.setattr(full_target, "find_tensorrt", lambda: library)
    build(checkpoint, tmp_path / "e").fails(*words)
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_times_are_kept_in_a_file_of_the_target(installed: Library, checkpoint: Path, tmp_path: Path) -> None:
    """Read, then written; of another GPU it is refused, and nothing is built; nothing is timed where that is asked."""
    cache, own = tmp_path / "times", tmp_path / "times.tensorrt-sm90"
    for count in (1, 2):
        build(checkpoint, tmp_path / "e", "tensorrt/sm90", "--timing_cache", cache).succeeds()
        assert own.read_bytes() == b"." * count
    own.write_bytes(b"another GPU")
    refused = build(checkpoint, tmp_path / "f", "tensorrt/sm90", "--timing_cache", cache)
    refused.fails("the timing cache is of another GPU or another TensorRT: name another file")
    assert own.read_bytes() == b"another GPU"
    assert not (tmp_path / "f").exists()
    build(checkpoint, tmp_path / "e", "tensorrt/sm90", "--no_autotune").succeeds()
    assert (tmp_path / "e" / "rank0.plan").read_bytes().endswith(b"untimed, whole")
    own.unlink()
    own.mkdir()
    build(checkpoint, tmp_path / "f", "tensorrt/sm90", "--timing_cache", cache).fails(
        "the timing cache cannot be read or written", code=2
    )


class FullRuntime:
    """Runtime of the full TensorRT: it does not judge a header."""

    def __init__(self, owner: EmulatedTensorRt) -> None:
        self.deserialize_cuda_engine = EmulatedRuntime(owner).deserialize_cuda_engine


@pytest.mark.slow
def test_it_runs_like_any_other(
    driver: ctypes.CDLL, installed: Library, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers against the checkpoint, with the real plugin; another version of the library is refused."""
    engine = tmp_path / "e"
    networks: list[onnx.ModelProto] = []

    def kept(graph: OpGraph, plan: Plan, folder: Path) -> None:
        hand_over(graph, plan, folder)
        networks.append(lower(*take_over(folder)))

    monkeypatch.setattr(full_compiler, "hand_over", kept)
    build(checkpoint, engine).succeeds()
    full = EmulatedTensorRt(driver, open_engine(engine).plan, networks[0])
    full.Runtime = lambda log: FullRuntime(full)  # type: ignore[method-assign, assignment, return-value]
    monkeypatch.setitem(sys.modules, MODULE, full)
    ids = [5, 9, 3, 7]
    with ModelRunner.from_dir(engine) as runner:
        found = runner.generate([ids], max_new_tokens=4, end_id=-1).tolist()
    build(checkpoint, tmp_path / "ref", "ref").succeeds()
    with ModelRunner.from_dir(tmp_path / "ref") as runner:
        assert found == runner.generate([ids], max_new_tokens=4, end_id=-1).tolist()
    assert {name for name, _ in full.steps} == {"mixed", "decode"}
    build(checkpoint, tmp_path / "both", "tensorrt/sm90,cuda/sm90").succeeds()
    compared = ingot("verify", tmp_path / "both", "--against", checkpoint, "--tokens", 8, "--json").succeeds()
    layers = {each["target"]: each["summary"]["layers"] for each in json.loads(compared.out)["comparisons"]}
    assert layers == {"cuda/sm90": "compared", "tensorrt/sm90": "not compared: tensorrt/sm90 has no taps"}
    options = SessionOptions(num_blocks=(4,), threads=2, directory=engine)
    with open_engine(engine) as opened, pytest.raises(UsageError, match="threads"):
        find_target("tensorrt/sm90").open_session(opened.plan, opened.weights, options)
    newer = Library(name="TensorRT", version="11.5.0.1", module=MODULE, folder=Path("nowhere"))
    monkeypatch.setattr(full_target, "find_tensorrt", lambda: newer)
    ingot("run", "--engine_dir", engine, "--prompt", "x").fails(
        "tensorrt/sm90 needs TensorRT 11.4.0.106, which built this engine; this machine has TensorRT 11.5.0.1"
    )
    runs = json.loads(ingot("doctor", tmp_path / "both", "--json").succeeds().out)["engines"][0]["takes"]
    assert runs == "cuda/sm90", "another target of the engine runs instead"
