"""Configurations that ingot refuses: transformers refuses them too, reads them otherwise, or has what ingot lacks."""

import pytest

from ingot.configs.read import Section
from ingot.convert.family import read_model
from ingot.errors import IngotError
from tests.convert.test_odd_configs import FACTORS, LINEAR, STRETCHED, Config, base_of


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"hidden_act": None}, "hidden_act is null(.|\n)*config.json:hidden_act"),
        ("llama", {"rope_theta": None}, "config.json:rope_theta"),
        ("gemma2", {"final_logit_softcapping": 1e-60}, "soft cap of the logits or scores is too small"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "list of 5 numbers above 0"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "list of 2 numbers above 0"),
        ("falcon_h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        (
            "ernie4_5_moe",
            {"num_experts_per_tok": 2},
            "num_experts_per_tok contradicts moe_k(.|\n)*3, the value of moe_k",
        ),
        ("ernie4_5_moe", {"num_experts": 8}, "contradicts"),
        ("deepseek_v3", {"n_routed_experts": 2**31}, "too many experts(.|\n)*262,144"),
        ("deepseek_v3", {"rope_scaling": STRETCHED}, "attention_scale, which ingot reads"),
        ("opt", {"layer_norm_elementwise_affine": False}, "has a value that is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bloom", {"n_embed": 40}, "contradicts"),
        ("mpt", {"n_layers": 2**31}, "n_layers is too large"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max(.|\n)*8"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ("falcon", {"new_decoder_architecture": False, "multi_query": False}, "differs from num_attention_heads"),
        ("falcon", {"parallel_attn": False}, "number of norms does not fit"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "number of norms does not fit"),
        ("falcon_h1", {"mamba_n_heads": 5}, "Mamba 2 heads do not fit"),
        ("mistral", {"num_key_value_heads": None}, "config.json:num_key_value_heads"),
        ("mistral", {"sliding_window": 0}, "config.json:sliding_window(.|\n)*at least 1"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "names other layers"),
        ("llama", {"layer_types": ["full_attention"]}, "not one entry for each layer"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "the model has none"),
        ("gpt2", {"num_hidden_layers": 1}, "num_hidden_layers contradicts n_layer(.|\n)*2, the value of n_layer"),
        ("llama", {"rope_scaling": {"type": "su", **FACTORS}}, "rope_type .* is not supported"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "not supported(.|\n)*default, longrope, su"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rotate alike"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "an object for each kind"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "has the older key"),
        ("gemma3n_text", {"altup_active_idx": 1}, "stream 1 of 3"),
        ("gemma3n_text", {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor other"),
        ("gemma3n_text", {"rope_scaling": {**LINEAR, "partial_rotary_factor": None}}, "partial_rotary_factor"),
        ("olmo3", {"rope_parameters": {"full_attention": {**LINEAR, "partial_rotary_factor": 0.5}}}, "partial_rotary"),
        ("gemma3n_text", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input 0"),
        ("gpt_oss", {"rope_theta": 1}, "too small for rope_type yarn"),
        ("gemma3n_text", {"activation_sparsity_pattern": [1.0, 0.0, 0.0]}, "3 numbers from 0 to below 1"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers(.|\n)*fewer than 3(.|\n)*got: 3"),
        ("gemma4_text", {"num_kv_shared_layers": 10**12}, "num_kv_shared_layers(.|\n)*fewer than 3"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "no layer is left whose keys and values"),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ("gemma4_text", {"global_head_dim": 1 << 20}, "heads of the model are too large"),
        ("gemma4_text", {"global_head_dim": 21}, "whole number of rotary pairs(.|\n)*of 21"),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 query heads, 3 key"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 12}}}, "heads of different sizes"),
        ("gemma4_text", {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "heads of different sizes"),
        ("gemma4_text", {"vocab_size_per_layer_input": 60}, "less than vocab_size"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention has a value"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {}}}, "rope_type"),
    ],
)
def test_what_transformers_refuses_or_reads_otherwise_is_refused(name: str, change: Config, words: str) -> None:
    with pytest.raises(IngotError, match=words):
        read_model(Section({**base_of(name), **change}, "config.json"), None)
