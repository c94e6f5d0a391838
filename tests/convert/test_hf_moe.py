"""Mixtures of experts: every spelling of their files and configurations, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.configs.model import MoeConfig
from ingot.configs.read import Section
from ingot.convert.conversion import conversion_from_directory
from ingot.convert.convert import convert
from ingot.convert.family import find_family, read_model
from ingot.convert.hf_moe import read_experts
from ingot.dtypes import DType
from ingot.errors import CheckpointError, ConfigError, IngotError, UnsupportedModelError
from ingot.tensor_file import read_header, read_rows
from tests.handmade import write_safetensors
from tests.tiny import tiny_model

PARTS = ("model.onnx", "model.safetensors")
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "hy_v3",
    "minimax_m2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)


def read(config: Mapping[str, Any]) -> MoeConfig | None:
    return read_model(Section(config, "config.json"), None)[1].moe


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All float32 tensors of a model directory."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: read_rows(tensor).reshape(tensor.shape) for name, tensor in read_header(file).items()}
    return found


def respelled(source: Path, folder: Path, old: str, new: str) -> None:
    """A copy of a model directory whose tensors have other names."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    renamed = {name.replace(old, new): (DType.F32, values) for name, values in tensors(source).items()}
    write_safetensors(folder / "model.safetensors", renamed)


def checkpoint(model: Path, folder: Path) -> tuple[dict[str, np.ndarray], list[onnx.NodeProto], Any]:
    """Weights, nodes and model configuration of what a directory becomes."""
    convert(ConvertOptions(model_dir=model, output_dir=folder))
    nodes = list(onnx.load(folder / "model.onnx", load_external_data=False).graph.node)
    return tensors(folder), nodes, Checkpoint.open(folder).config.model


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_spelling_gives_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "each", dict(find_family(name).tiny))
    made.model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    made.model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    folders = ["each", "stacked", "shards"]
    if name == "mixtral":  # transformers 5 reads these too
        folders += ["each-new", "stacked-old"]
        respelled(tmp_path / "each", tmp_path / "each-new", ".block_sparse_moe.", ".mlp.")
        respelled(tmp_path / "stacked", tmp_path / "stacked-old", ".mlp.", ".block_sparse_moe.")
    assert "gate_up_proj" not in " ".join(tensors(tmp_path / "each"))
    assert "gate_up_proj" in " ".join(tensors(tmp_path / "stacked"))
    first: Any = None
    files: set[bytes] = set()
    for folder in folders:
        weights, nodes, model = checkpoint(tmp_path / folder, tmp_path / f"{folder}-checkpoint")
        first = first or (weights, nodes, model)
        assert set(weights) == set(first[0]), folder
        assert all(np.array_equal(values, first[0][key]) for key, values in weights.items()), folder
        assert (nodes, model) == first[1:], folder
        if folder != "shards":
            files.add(b"".join((tmp_path / f"{folder}-checkpoint" / part).read_bytes() for part in PARTS))
    assert len(files) == 1


@pytest.mark.daily(5)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_streamed(name: str, stacked: bool, tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "m", dict(find_family(name).tiny))
    if stacked:
        made.model.save_pretrained(tmp_path / "m", save_original_format=False)
    conversion = conversion_from_directory(
        tmp_path / "m", ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c")
    )
    assert all(weight.memory == 0 for weights in conversion.files.values() for weight in weights)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "m", dict(find_family("qwen3_moe").tiny))
    left = {name: (DType.F32, values) for name, values in tensors(made.folder).items() if ".experts.7.up" not in name}
    write_safetensors(made.folder / "model.safetensors", left)
    with pytest.raises(CheckpointError, match=r"2 that the files lack: model.layers.0.mlp.experts.7.up_proj.weight"):
        convert(ConvertOptions(model_dir=made.folder, output_dir=tmp_path / "c"))


def test_tensors_of_a_shared_expert_are_unclaimed(tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "m", dict(find_family("qwen3_moe").tiny))
    more = {name: (DType.F32, values) for name, values in tensors(made.folder).items()}
    more["model.layers.0.mlp.shared_expert.up_proj.weight"] = (DType.F32, np.zeros((4, 4), np.float32))
    write_safetensors(made.folder / "model.safetensors", more)
    with pytest.raises(
        CheckpointError, match=r"1 that config.json does not ask for: model.layers.0.mlp.shared_expert.up_proj.weight"
    ):
        convert(ConvertOptions(model_dir=made.folder, output_dir=tmp_path / "c"))


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """Those of the next layer alone: one beyond that belongs to another model."""
    made = tiny_model(tmp_path / "m", dict(find_family("glm4_moe").tiny))
    given = {name: (DType.F32, values) for name, values in tensors(made.folder).items()}
    more = np.zeros((4, 4), np.float32)
    write_safetensors(made.folder / "model.safetensors", {**given, "model.layers.3.eh_proj.weight": (DType.F32, more)})
    report = convert(ConvertOptions(model_dir=made.folder, output_dir=tmp_path / "c"))
    assert report.warnings == ("1 tensors that draft tokens are left out: the model drafts none",)
    write_safetensors(made.folder / "model.safetensors", {**given, "model.layers.4.eh_proj.weight": (DType.F32, more)})
    with pytest.raises(CheckpointError, match=r"1 that config.json does not ask for: model.layers.4.eh_proj.weight"):
        convert(ConvertOptions(model_dir=made.folder, output_dir=tmp_path / "d"))


def test_the_bias_that_selects_keeps_float32(tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "m", dict(find_family("minimax_m2").tiny))
    convert(ConvertOptions(model_dir=made.folder, output_dir=tmp_path / "c", dtype=DType.BF16))
    stored = read_header(tmp_path / "c" / "model.safetensors")
    path = "layers.0/moe/router"
    assert (stored[f"{path}/select/bias"].dtype, stored[f"{path}/weight"].dtype) == (DType.F32, DType.BF16)
    given = tensors(made.folder)["model.layers.0.block_sparse_moe.e_score_correction_bias"]
    np.testing.assert_array_equal(read_rows(stored[f"{path}/select/bias"]).reshape(-1), given)


def test_which_layers_have_experts() -> None:
    tiny = {**find_family("qwen3_moe").tiny, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    for step, dense in ((1, (3,)), (2, (0, 2, 3, 4)), (3, (0, 1, 3, 4))):
        moe = read({**tiny, "decoder_sparse_step": step})
        assert moe is not None
        assert moe.dense_layers == dense
    assert read({**tiny, "decoder_sparse_step": 7}) is None
    del tiny["num_experts"]
    assert read({**tiny, "mlp_only_layers": None, "num_local_experts": 7}) == MoeConfig(
        experts=7, per_token=4, intermediate_size=20, normalized=True
    )


def test_the_graph_holds_standard_ops_and_each_expert_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(find_family("qwen3_moe").tiny)))
    options = ConvertOptions(config=tmp_path / "config.json", random_weights=3, output_dir=tmp_path / "c")
    assert convert(options).model.moe is not None
    graph = onnx.load(tmp_path / "c" / "model.onnx", load_external_data=False).graph
    assert {node.domain for node in graph.node} == {""}
    assert {"TopK", "ScatterElements"} <= {node.op_type for node in graph.node}
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert shapes["layers.0/moe/gate_up/weight"] == [9, 40, 48]
    assert shapes["layers.0/moe/down/weight"] == [9, 48, 20]
    assert "layers.1/moe/router/weight" not in shapes
    assert shapes["layers.1/mlp/gate/weight"] == [84, 48]


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, ConfigError, "num_experts_per_tok(.|\n)*at most 5"),
        ("mixtral", {"num_local_experts": 0}, ConfigError, "num_local_experts"),
        ("mixtral", {"num_experts": 6}, ConfigError, "contradicts(.|\n)*num_local_experts"),
        ("mixtral", {"n_shared_experts": 1}, UnsupportedModelError, "config.json:n_shared_experts"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, UnsupportedModelError, "shared_expert_intermediate"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, UnsupportedModelError, "scoring_func(.|\n)*sigmoid"),
        ("qwen3_moe", {"use_qk_norm": False}, UnsupportedModelError, "use_qk_norm"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, ConfigError, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ConfigError, "decoder_sparse_step"),
        ("qwen3_moe", {"norm_topk_prob": 1}, ConfigError, "norm_topk_prob"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, ConfigError, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"n_shared_experts": 1}, UnsupportedModelError, "n_shared_experts"),
        ("glm4_moe", {"n_group": 5}, ConfigError, "n_group(.|\n)*a divisor of 12"),
        ("glm4_moe", {"n_group": 12}, ConfigError, "n_group(.|\n)*at most 6"),
        ("glm4_moe", {"topk_group": 5}, ConfigError, "topk_group(.|\n)*1 to 4"),
        ("glm4_moe", {"num_experts_per_tok": 7}, ConfigError, "topk_group(.|\n)*3 to 4"),
        ("glm4_moe", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func(.|\n)*sigmoid"),
        ("glm4_moe", {"topk_method": "greedy"}, UnsupportedModelError, "topk_method"),
        ("glm4_moe", {"routed_scaling_factor": 0}, ConfigError, "routed_scaling_factor"),
        ("glm4_moe", {"routed_scaling_factor": 1e39}, ConfigError, "scale, which ingot reads"),
        ("glm4_moe", {"n_shared_experts": 0}, ConfigError, "n_shared_experts"),
        ("hy_v3", {"mlp_layer_types": ["dense", "sparse"]}, ConfigError, "mlp_layer_types"),
        ("hy_v3", {"mlp_layer_types": ["dense", "sparse", "other"]}, ConfigError, "mlp_layer_types"),
        ("gpt_oss", {"swiglu_limit": 0}, ConfigError, "swiglu_limit"),
        ("gpt_oss", {"swiglu_limit": 1e39}, ConfigError, "gate_limit, which ingot reads"),
        ("gpt_oss", {"swiglu_alpha": -1.0}, ConfigError, "swiglu_alpha"),
        ("gpt_oss", {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
        ("gpt_oss", {"num_experts_per_tok": 6}, ConfigError, "at most 5"),
        ("minimax_m2", {"use_routing_bias": False}, UnsupportedModelError, "use_routing_bias"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, UnsupportedModelError, "linear attention"),
        ("minimax_m2", {"rotary_dim": 32}, UnsupportedModelError, "partial_rotary_factor"),
        ("ernie4_5_moe", {"moe_k": 10}, ConfigError, "moe_k(.|\n)*at most 9"),
        ("ernie4_5_moe", {"moe_norm_min": 0}, ConfigError, "moe_norm_min"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], error: type[IngotError], words: str) -> None:
    tiny = find_family(name).tiny
    with pytest.raises(error, match=words):
        read({**tiny, "model_type": name, **changes})


def test_keys_that_ask_for_nothing_are_accepted() -> None:
    tiny = find_family("qwen3_moe").tiny
    more = {
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
        "qkv_bias": False,
        "max_window_layers": 2,
        "router_aux_loss_coef": 0.1,
        "output_router_logits": True,
    }
    assert read_model(Section({**tiny, **more}, "config.json"), None)[2] == ()


def test_a_token_may_take_every_expert_and_no_more() -> None:
    def taken(count: int) -> int:
        section = Section({"num_experts_per_tok": count}, "config.json")
        return read_experts(section, experts=4, per_token=2, intermediate_size=8, normalized=True).per_token

    assert taken(4) == 4
    with pytest.raises(ConfigError, match=r"more than the number of experts(.|\n)*at most 4"):
        taken(5)
