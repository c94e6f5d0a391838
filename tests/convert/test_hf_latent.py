"""Latent attention as config.json spells it: models of the Hub with all their options, and what is refused."""

from typing import Any

import pytest

from ingot.configs.model import LatentConfig, ModelConfig
from ingot.configs.read import Section
from ingot.convert.family import find_family, read_model
from ingot.errors import ConfigError, IngotError, UnsupportedModelError

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
HUB: dict[str, tuple[dict[str, Any], LatentConfig]] = {
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
            "aux_loss_alpha": 0.001,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
        },
        LatentConfig(q_rank=0, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128),
    ),
    "DeepSeek-R1": (
        {
            "model_type": "deepseek_v3",
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
        },
        LatentConfig(q_rank=1536, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128),
    ),
    "GLM-4.7-Flash": (
        {
            "model_type": "glm4_moe_lite",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
        },
        LatentConfig(q_rank=768, kv_rank=512, key_dim=192, rope_dim=64, value_dim=256),
    ),
}
SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}


def read(config: dict[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    _, model, unread = read_model(Section({**SIZES, "hidden_act": "silu", **config}, "config.json"), None)
    return model, unread


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub(name: str) -> None:
    config, latent = HUB[name]
    model, unread = read(config)
    assert model.latent == latent
    assert not unread, "no option is left unread"
    assert model.rope is not None
    assert (model.rope.rotary_dim, model.rope.interleaved) == (64, True)
    assert model.moe is not None
    assert (model.moe.experts, model.moe.per_token) == (config["n_routed_experts"], config["num_experts_per_tok"])
    assert model.moe.dense_layers == tuple(range(config["first_k_dense_replace"]))


def test_stretched_rotations_raise_the_scores() -> None:
    """Scores by the square of what cosines and sines do not have: these have a ratio."""
    model, _ = read(HUB["DeepSeek-R1"][0])
    assert model.attention_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert model.rope is not None
    assert model.rope.scale == 1
    plain, _ = read({**HUB["DeepSeek-R1"][0], "rope_scaling": None})
    assert plain.attention_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 2},
            ConfigError,
            "equal groups of 1 or more",
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method"),
        ("deepseek_v2", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("deepseek_v2", {"num_key_value_heads": 2}, ConfigError, "num_key_value_heads(.|\n)*4"),
        ("deepseek_v2", {"kv_lora_rank": 0}, ConfigError, "kv_lora_rank"),
        ("deepseek_v2", {"kv_lora_rank": 18}, UnsupportedModelError, "kv_lora_rank(.|\n)*18"),
        ("deepseek_v2", {"qk_rope_head_dim": 6}, UnsupportedModelError, "qk_rope_head_dim"),
        ("deepseek_v2", {"kv_lora_rank": 1020}, ConfigError, "at most 1024"),
        ("deepseek_v2", {"q_lora_rank": -1}, ConfigError, "q_lora_rank"),
        ("deepseek_v2", {"qk_nope_head_dim": "12"}, ConfigError, "qk_nope_head_dim"),
        ("deepseek_v2", {"v_head_dim": None}, ConfigError, "v_head_dim"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func"),
        ("deepseek_v3", {"rope_interleave": 1}, ConfigError, "rope_interleave"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, ConfigError, "mlp_layer_types"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}, UnsupportedModelError, "layer_types(.|\n)*indexed"),
        ("deepseek_v32", {"rope_interleave": False}, UnsupportedModelError, "rope_interleave(.|\n)*true"),
        ("deepseek_v32", {"index_topk": 0}, ConfigError, "index_topk"),
        (
            "mistral4",
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.9, "llama_4_scaling_beta": 0.1}},
            ConfigError,
            r"partial_rotary_factor(.|\n)*8 of 20",
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, ConfigError, "first_k_dense_replace"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], error: type[IngotError], words: str) -> None:
    config = {**find_family(name).tiny, **changes}
    with pytest.raises(error, match=words):
        read_model(Section(config, "config.json"), None)


def test_sparse_attention_is_exact_up_to_what_it_chooses() -> None:
    """Positions beyond are left out, whatever the rotation stretches to; where all are chosen it is no limit."""
    v3 = {key: each for key, each in HUB["DeepSeek-R1"][0].items() if key != "model_type"}
    model, unread = read({**v3, "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64})
    assert not unread
    assert (model.max_positions, model.sparse_beyond) == (2048, 2048)
    whole, _ = read({**v3, "model_type": "deepseek_v32", "index_topk": 1 << 20})
    assert (whole.max_positions, whole.sparse_beyond) == (163840, 0)


def test_queries_that_grow() -> None:
    grows = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    tiny = {**find_family("mistral4").tiny, "max_position_embeddings": 1 << 20}
    model = read({**tiny, "rope_parameters": grows})[0]
    assert (model.max_positions, model.query_growth, model.growth_positions) == (1 << 20, 0.1, 4096)
    assert read({**tiny, "rope_parameters": {**grows, "llama_4_scaling_beta": 0.0}})[0].growth_positions == 0
    with pytest.raises(ConfigError, match=r"llama_4_scaling_beta(.|\n)*0 or more"):
        read({**tiny, "rope_parameters": {**grows, "llama_4_scaling_beta": -0.1}})
