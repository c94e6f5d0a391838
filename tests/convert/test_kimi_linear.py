"""Kimi Linear as config.json spells it: the file of the Hub, names of keys, and what is refused."""

from typing import Any

import pytest

from ingot.configs.mixers import LinearAttentionConfig
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families.kimi_linear import FAMILY
from ingot.convert.family import read_model
from ingot.errors import ConfigError, IngotError, UnsupportedModelError

HUB: dict[str, Any] = {  # 48B-A3B, with fewer layers
    "model_type": "kimi_linear",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
}


def read(config: dict[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    _, model, unread = read_model(Section(config, "config.json"), None)
    return model, unread


def test_the_model_of_the_hub() -> None:
    model, unread = read(HUB)
    assert not unread, "no option is left unread"
    assert model.mixer_layers == (0, 1, 2, 4)
    assert model.still_layers == (0, 1, 2, 3, 4)
    assert model.mixer == LinearAttentionConfig(
        key_heads=32, heads=32, key_dim=128, value_dim=128, conv_width=4, low_rank=128
    )
    assert model.moe is not None
    assert (model.moe.experts, model.moe.per_token, model.moe.scale, model.moe.dense_layers) == (256, 8, 2.446, (0,))
    assert model.latent is not None
    assert (model.latent.q_rank, model.max_positions) == (0, 1048576)


def test_keys_have_two_names() -> None:
    """transformers takes both; where both are there they must agree."""
    other = {key: each for key, each in HUB.items() if key not in ("num_experts_per_token", "model_max_length")}
    renamed = {**other, "num_experts_per_tok": 8, "max_position_embeddings": 1048576}
    assert read(renamed) == read(HUB)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok(.|\n)*8, the value of num_experts_per_token"):
        read({**HUB, "num_experts_per_tok": 4})
    with pytest.raises(ConfigError, match=r"config\.json:num_experts_per_token"):
        read({**HUB, "num_experts_per_token": "8"})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mla_use_nope": False}, UnsupportedModelError, "mla_use_nope(.|\n)*true"),
        ({"mla_use_output_gate": True}, UnsupportedModelError, "mla_use_output_gate"),
        ({"routed_expert_hidden_size": 3584}, UnsupportedModelError, "routed_expert_hidden_size"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, UnsupportedModelError, "gate_lower_bound"),
        ({"linear_attn_config": {"use_full_rank_gate": True}}, UnsupportedModelError, "use_full_rank_gate"),
        ({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}}, ConfigError, "each of 1 to 3"),
        ({"linear_attn_config": {"num_heads": 0}}, ConfigError, "num_heads"),
        ({"moe_router_activation_func": "softmax"}, UnsupportedModelError, "moe_router_activation_func"),
        ({"layer_types": ["linear_attention"] * 3}, ConfigError, "at least one full_attention"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[IngotError], words: str) -> None:
    with pytest.raises(error, match=words):
        read({**FAMILY.tiny, **changes})
