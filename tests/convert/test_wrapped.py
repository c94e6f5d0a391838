"""Text models inside wrappers: as transformers writes them, and as the files of the Hub are spelled."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import ConvertReport, convert
from ingot.convert.families.kimi_k2 import FAMILY as KIMI_K2
from ingot.convert.family import read_model
from ingot.convert.wrapped import WRAPPERS
from ingot.errors import CheckpointError, ConfigError, IngotError
from tests.tiny import logits_by_token

Config = dict[str, Any]
TOLERANCE = 1e-5  # of the range of the logits
TOLERANCE_OF_ROUTED_STATES = 3e-5  # as far as transformers' two forms of the delta rule lie from each other here
TEXT: Config = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER: Config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER: Config = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}
QWEN2_TOWER: Config = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
SECTIONS: Config = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]}
IDS_OF_IMAGES = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
PIXTRAL: Config = {**TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 16, "patch_size": 4}

QWEN35_TEXT: Config = {
    **{**TEXT, "head_dim": 16, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
QWEN35_EXPERTS: Config = {
    **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "shared_expert_intermediate_size": 20,
}

GEMMA4_TEXT: Config = {
    **{**TEXT, "head_dim": 12, "global_head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
GEMMA4_TOWER: Config = {**TOWER, "head_dim": 8, "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2}
GEMMA4_EARS: Config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
IDS_OF_GEMMA4: Config = {"image_token_id": 50, "video_token_id": 51, "audio_token_id": 52}

MODELS: dict[str, Config] = {
    "gemma3n": {
        "text_config": {
            **{**TEXT, "model_type": "gemma3n_text", "head_dim": 12, "sliding_window": 8, "num_kv_shared_layers": 1},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.9, 0.0, 0.5],
        },
        "vision_config": {"vocab_size": 4},
        "audio_config": {"vocab_size": 4},
    },
    "gemma4": {
        "text_config": {
            **{**GEMMA4_TEXT, "model_type": "gemma4_text", "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "vision_config": GEMMA4_TOWER,
        "audio_config": GEMMA4_EARS,
        **IDS_OF_GEMMA4,
    },
    "gemma4_unified": {
        "text_config": {
            **{**GEMMA4_TEXT, "model_type": "gemma4_unified_text", "attention_k_eq_v": True},
            "num_global_key_value_heads": 1,
        },
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16},
        "audio_config": {"audio_embed_dim": 16},
        **IDS_OF_GEMMA4,
    },
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 12, "sliding_window": 8},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": 4,
        "image_token_index": 50,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16},
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": 50,
        "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        "vision_config": {**TOWER, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
        "projector_hidden_size": 16,
        "image_token_id": 50,
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        "image_token_index": 50,
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4},
        "image_token_index": 50,
        "video_token_index": 51,
    },
    "kimi_k25": {
        "text_config": {
            **{key: each for key, each in KIMI_K2.tiny.items() if key != "model_type"},
            **{"model_type": "deepseek_v3", "bos_token_id": 1, "eos_token_id": 2},
        },
        "vision_config": {**TOWER, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 16,
        "tie_word_embeddings": False,
        **IDS_OF_IMAGES,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        "image_token_index": 50,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": 8},
        "vision_config": PIXTRAL,
        "image_token_index": 50,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "model_type": "qwen2_vl_text", "rope_parameters": SECTIONS},
        "vision_config": QWEN2_TOWER,
        **IDS_OF_IMAGES,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS},
        "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 16},
        **IDS_OF_IMAGES,
    },
    "qwen3_5": {
        "text_config": {**QWEN35_TEXT, "model_type": "qwen3_5_text"},
        "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
        "tie_word_embeddings": True,
        **IDS_OF_IMAGES,
    },
    "qwen3_5_moe": {
        "text_config": {**QWEN35_TEXT, **QWEN35_EXPERTS, "model_type": "qwen3_5_moe_text"},
        "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
        "tie_word_embeddings": False,
        **IDS_OF_IMAGES,
    },
    "qwen3_vl": {
        "text_config": {
            **{**TEXT, "model_type": "qwen3_vl_text", "head_dim": 16},
            "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": QWEN_TOWER,
        "tie_word_embeddings": True,
        **IDS_OF_IMAGES,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **{**TEXT, "model_type": "qwen3_vl_moe_text", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 12, "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        },
        "vision_config": QWEN_TOWER,
        "tie_word_embeddings": False,
        **IDS_OF_IMAGES,
    },
}


def made(name: str, folder: Path) -> Any:
    """A wrapper of transformers with random weights, saved as `save_pretrained` writes it."""
    config = AutoConfig.for_model(name, **json.loads(json.dumps(MODELS[name])))
    kind: Any = AutoModelForImageTextToText
    if name == "gemma3n":
        config, kind = config.text_config, AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in model.parameters():
            noise = torch.randn(each.shape, generator=generator)
            each.copy_(1 + 0.2 * noise if each.ndim == 1 else noise * 0.3)
    if name == "gemma3n":  # whose tower is timm's
        _save_inside(model, folder)
        return model
    model.save_pretrained(folder)
    if name == "kimi_k25":  # whose layers transformers 5.23 renames to those of the tower
        tensors = {key: each.contiguous() for key, each in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _save_inside(model: Any, folder: Path) -> None:
    """A text model as the wrapper of Gemma 3n holds it, beside what stands for towers."""
    folder.mkdir()
    inside = {
        f"model.language_{key}": each.contiguous() for key, each in model.state_dict().items() if "lm_head" not in key
    }
    parts = ("vision_tower.conv", "audio_tower.conv", "embed_vision.embedding", "embed_audio.embedding")
    inside |= {f"model.{part}.weight": torch.zeros(2, 3) for part in parts}
    save_file(inside, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**MODELS["gemma3n"], "model_type": "gemma3n", "text_config": model.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))


def logits(checkpoint: Path, ids: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(checkpoint / "model.onnx", providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"input_ids": ids})[0]
    return found


def converted(folder: Path) -> ConvertReport:
    return convert(ConvertOptions(model_dir=folder, output_dir=folder.parent / f"{folder.name}-checkpoint"))


def check(model: Any, report: ConvertReport) -> None:
    ids = np.random.default_rng(1).integers(0, 49, (2, 40))
    if report.model.mixer is None:
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    else:
        expected = logits_by_token(model, ids)
    routed_states = report.model.mixer is not None and report.model.moe is not None
    tolerance = TOLERANCE_OF_ROUTED_STATES if routed_states else TOLERANCE
    assert np.abs(logits(report.output_dir, ids) - expected).max() < tolerance * np.ptp(expected)


@pytest.mark.slow
def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    model = made("qwen3_5", tmp_path / "m")
    files = load_file(tmp_path / "m" / "model.safetensors")
    more = {"mtp.fc.weight": torch.zeros(3, 4), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(3, 4)}
    save_file({**files, **more}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    report = converted(tmp_path / "m")
    assert "2 tensors that draft tokens are left out: the model drafts none" in report.warnings
    check(model, report)


def test_every_wrapper_is_tried() -> None:
    assert set(MODELS) == set(WRAPPERS)


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", WRAPPERS)
def test_as_transformers_writes_them(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "m")
    report = converted(tmp_path / "m")
    check(model, report)
    assert any("the text model alone is converted" in each for each in report.warnings)


OLD = {
    "gemma3": "language_model.model.",
    "kimi_k25": "language_model.model.",
    "internvl": "language_model.model.",
    "llava": "language_model.model.",
    "llava_next": "language_model.model.",
    "llava_onevision": "language_model.model.",
    "mistral3": "language_model.model.",
    "qwen2_vl": "model.",
    "qwen2_5_vl": "model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
}


@pytest.mark.daily(6)
@pytest.mark.parametrize("name", OLD)
def test_as_the_hub_has_them(name: str, tmp_path: Path) -> None:
    """Older prefixes; Qwen2's configuration flat, with a rotation of kind mrope."""
    model = made(name, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = {
        key.replace("model.language_model.", "model.").replace("language_model.model.", "model."): each
        for key, each in load_file(file).items()
    }
    renamed = {}
    if WRAPPERS[name].experts_in_out:
        tensors = {key: each.mT.contiguous() if ".experts." in key else each for key, each in tensors.items()}
    for key, each in tensors.items():
        if key.startswith("lm_head.") and OLD[name].startswith("language_model"):
            renamed[f"language_model.{key}"] = each
        elif key.startswith(("model.layers.", "model.norm.", "model.embed_tokens.")):
            renamed[key.replace("model.", OLD[name], 1)] = each
        else:
            renamed[key.removeprefix("model.")] = each
    save_file(renamed, file)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    if WRAPPERS[name].flat:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "model_type": name}
        text.pop("layer_types", None)
    config.pop("tie_word_embeddings", None)
    config.get("text_config", {}).pop("tie_word_embeddings", None)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    check(model, converted(tmp_path / "m"))


def read(config: Config) -> Any:
    return read_model(Section(config, "config.json"), None)


@pytest.mark.parametrize("name", WRAPPERS)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A text_config that says little, as Gemma's and LLaVA's files have it."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    text = {**sizes, "num_attention_heads": 32}
    if name == "kimi_k25":  # whose heads of keys are as many
        text |= {"num_key_value_heads": 32}
    if name == "gemma3n":  # whose last 15 layers share
        text |= {"num_kv_shared_layers": 0}
    full = AutoConfig.for_model(name, text_config=dict(text)).to_dict()
    assert (
        read({"model_type": name, "text_config": text})[1]
        == read({"model_type": name, "text_config": full["text_config"]})[1]
    )


def test_sizes_of_small_files() -> None:
    gemma = read({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}})[1]
    assert (gemma.vocab_size, gemma.heads, gemma.intermediate_size, gemma.tied_embeddings) == (262208, 8, 9216, True)
    llava = read({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}})[1]
    assert (llava.vocab_size, llava.hidden_size, llava.num_layers, llava.tied_embeddings) == (32064, 4096, 32, False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma3"}, "text_config is missing"),
        ({"model_type": "gemma3", "text_config": 3}, "config.json:text_config"),
        ({"model_type": "mistral3", "text_config": {**TEXT, "model_type": "mamba"}}, "not supported(.|\n)*mamba"),
        ({"model_type": "qwen3_vl", "text_config": {**TEXT, "hidden_act": "relu3"}}, "text_config.hidden_act"),
        ({"model_type": "llava", "text_config": TEXT, "tie_word_embeddings": 3}, "tie_word_embeddings"),
    ],
)
def test_what_is_refused(config: Config, words: str) -> None:
    with pytest.raises(IngotError, match=words):
        read(config)


def test_keys_of_the_wrapper_that_nobody_knows_are_named() -> None:
    assert read({"model_type": "llava", "text_config": TEXT, "strange": 1})[2] == ("strange",)
    with pytest.raises(ConfigError):
        read({"model_type": "llava", "text_config": {**TEXT, "hidden_size": None}})


def test_a_tower_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    made("llava", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), "model.ears.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"model\.ears\.weight"):
        converted(tmp_path / "m")
