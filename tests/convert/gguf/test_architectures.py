"""Every architecture: a tiny model of transformers, written as llama.cpp's converter lays it, has its logits."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.convert.gguf.architectures import ARCHITECTURES
from ingot.errors import IngotError
from tests import gguf_files as write
from tests.convert.gguf.test_blocks import paired
from tests.convert.test_golden import TOLERANCE, logits_of_graph
from tests.tiny import LLAMA3, tiny_model

Tensors = dict[str, np.ndarray]
Settings = dict[str, Any]
KEYS = {
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """family: whose tiny model. change: of its config.json. eps: of its norms. lay: what the converter does."""

    family: str
    change: Settings = dataclasses.field(default_factory=dict)
    eps: str = "attention.layer_norm_rms_epsilon"
    lay: Callable[[Settings, Tensors], Tensors] = lambda config, tensors: tensors
    settings: Settings = dataclasses.field(default_factory=dict)


def pairs(config: Settings, tensors: Tensors) -> Tensors:
    for name, value in tensors.items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                tensors[name] = paired(value, config[heads])
    return tensors


def plus_one(config: Settings, tensors: Tensors) -> Tensors:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in tensors.items()}


def transposed(config: Settings, tensors: Tensors) -> Tensors:
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: value.T if name.endswith(turned) else value for name, value in tensors.items()}


def by_part(config: Settings, tensors: Tensors) -> Tensors:
    heads = config["num_attention_heads"]
    for name, value in tensors.items():
        if ".query_key_value." in name:
            tensors[name] = value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
    return tensors


def stacks(config: Settings, tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, under the name of expert {e}."""
    made: Tensors = {}
    for name, value in tensors.items():
        parts = name.split(".")
        if "experts" in parts:
            at = parts.index("experts") + 1
            key = ".".join([*parts[:at], "{e}", *parts[at + 1 :]])
            made[key] = np.concatenate([made.get(key, np.empty((0, *value.shape), np.float32)), value[None]])
        else:
            made[name] = value
    return made


FREE = {"layer_types": None, "use_sliding_window": False, "sliding_window": None}
CASES = {
    "llama": Case(family="llama", change={"attention_bias": True, "mlp_bias": True}, lay=pairs),
    "llama, tied": Case(family="llama", change={"tie_word_embeddings": True}, lay=pairs),
    "llama, linear": Case(
        family="llama",
        change={"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
        settings={"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        lay=pairs,
    ),
    "llama, mixtral": Case(
        family="mixtral",
        change={"sliding_window": None},
        lay=lambda config, t: stacks(config, pairs(config, t)),
        settings={"rope.freq_base": 1e6},
    ),
    "qwen2": Case(family="qwen2", change=FREE),
    "qwen2, yarn": Case(
        family="qwen2",
        change={
            **FREE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        settings={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3": Case(family="qwen3", change=FREE),
    "qwen3moe": Case(family="qwen3_moe", change={**FREE, "mlp_only_layers": []}, lay=stacks),
    "gemma": Case(family="gemma", lay=plus_one),
    "gemma2": Case(family="gemma2", change={"query_pre_attn_scalar": 20}, lay=plus_one),
    "gemma3": Case(
        family="gemma3_text",
        change={"query_pre_attn_scalar": 20},
        lay=plus_one,
        settings={"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
    ),
    "phi3": Case(
        family="phi3",
        settings={
            "attention.key_length": 16,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 128,
            "attention.sliding_window": 24,
        },
    ),
    "olmo2": Case(family="olmo2"),
    "starcoder2": Case(family="starcoder2", change={"sliding_window": None}, eps="attention.layer_norm_epsilon"),
    "gpt2": Case(
        family="gpt2", lay=transposed, eps="attention.layer_norm_epsilon", settings={"feed_forward_length": 192}
    ),
    "gptneox": Case(
        family="gpt_neox",
        lay=by_part,
        eps="attention.layer_norm_epsilon",
        settings={"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
}
EPS = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-6}
FIVE = ("olmo2", "phi3", "mixtral")  # families whose default is 1e-5


def their_tensors(folder: Path, architecture: str) -> Tensors:
    """By Hugging Face's names, experts one by one as the trained models have them."""
    tensors = {name: np.asarray(value) for name, value in load_file(folder / "model.safetensors").items()}
    made = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            names = ("w1", "w3") if "mixtral" in architecture else ("gate_proj", "up_proj")
            for e, both in enumerate(value):
                for part, half in zip(names, np.split(both, 2), strict=True):
                    made[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            part = "w2" if "mixtral" in architecture else "down_proj"
            for e, one in enumerate(value):
                made[name.replace("down_proj", f"{e}.{part}.weight")] = one
        else:
            made[name] = value
    if "mixtral" in architecture:
        made = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in made.items()}
    return made


def write_case(folder: Path, name: str, case: Case, extra: Tensors | None = None) -> tuple[Path, Any]:
    """(the GGUF file, the model)"""
    config = {**find_family(case.family).tiny, **case.change}
    config = {key: value for key, value in config.items() if value is not None or key == "layer_types"}
    model = tiny_model(folder / "model", {key: value for key, value in config.items() if key != "layer_types"})
    architecture = name.split(",")[0]
    settings = {KEYS[key]: value for key, value in config.items() if key in KEYS and value is not None}
    settings[case.eps] = 1e-5 if case.family in FIVE else EPS[case.eps]
    settings |= case.settings
    names: dict[str, str] = {}
    for ours, theirs in ARCHITECTURES[architecture].tensors.items():
        names.setdefault(theirs, ours)
    tensors = case.lay(config, their_tensors(folder / "model", name))
    tensors = {gguf_name(each, names): value for each, value in tensors.items()}
    document = {"general.architecture": architecture}
    document |= {f"{architecture}.{key}": value for key, value in settings.items()}
    stored = {key: write.floats(value) for key, value in {**tensors, **(extra or {})}.items()}
    return write.write_gguf(folder / "m.gguf", document, stored), model


def gguf_name(name: str, names: dict[str, str]) -> str:
    parts = name.split(".")
    layer = next((part for part in parts if part.isdecimal()), "")
    pattern = ".".join("{i}" if part == layer else part for part in parts)
    return names[pattern].replace("{i}", layer)


def assert_same(path: Path, model: Any, checkpoint: Path) -> None:
    convert(ConvertOptions(model_dir=path, output_dir=checkpoint))
    ids = np.random.default_rng(1).integers(0, 61, (2, 57))
    expected = model.logits(ids)
    assert np.abs(logits_of_graph(checkpoint, ids) - expected).max() < TOLERANCE * np.ptp(expected)


@pytest.mark.parametrize("name", CASES)
def test_an_architecture(tmp_path: Path, name: str) -> None:
    extra = {}
    if name == "phi3":
        rope = find_family("phi3").tiny["rope_parameters"]
        assert isinstance(rope, dict)
        for kind in ("short", "long"):
            extra[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    path, model = write_case(tmp_path, name, CASES[name], extra)
    assert_same(path, model, tmp_path / "checkpoint")


def test_factors_of_llama3(tmp_path: Path) -> None:
    """llama.cpp's files hold what the scaling makes of each frequency."""
    rope = dict(LLAMA3)
    case = Case(
        family="llama", change={"rope_parameters": rope}, settings={"rope.freq_base": rope["rope_theta"]}, lay=pairs
    )
    half = np.arange(0, 16, 2) / 16
    waves = 2 * np.pi * 500000.0**half
    smooth = np.clip((32 / waves - 1.0) / (4.0 - 1.0), 0, 1)
    factors = (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)
    path, model = write_case(tmp_path, "llama", case, {"rope_freqs.weight": factors})
    assert_same(path, model, tmp_path / "checkpoint")


def test_every_architecture_is_tried() -> None:
    assert {name.split(",")[0] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention.value_length": 8}, "llama.attention.value_length"),
        ({"attention.head_count": [4, 2]}, "differs from layer to layer"),
        ({"attention.temperature_scale": 0.5}, "does not know(.|\n)*temperature_scale"),
        ({"attention.causal": False}, "llama.attention.causal"),
        ({"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}, "rope_type"),
        ({"block_count": 20000}, "too many layers"),
        ({"embedding_length": 0}, "embedding_length"),
        ({"attention.head_count": 0}, "num_attention_heads"),
        ({"expert_shared_count": 2}, "expert_shared_count"),
        ({"block_count": 3}, "that the files lack"),
        ({"block_count": 1}, "does not ask for"),
        ({"feed_forward_length": 80}, "other shapes"),
    ],
)
def test_settings_that_are_not_applied(tmp_path: Path, settings: Settings, words: str) -> None:
    path, _ = write_case(tmp_path, "llama", dataclasses.replace(CASES["llama, tied"], settings=settings))
    with pytest.raises(IngotError, match=words):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()
