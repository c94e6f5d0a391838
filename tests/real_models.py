"""config.json of real models, every option as their makers set it: in full for speed, with small sizes for tests."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealModel:
    """config  of the whole model
    small   its sizes in tests; all else stays
    """

    config: Mapping[str, Any]
    small: Mapping[str, Any]

    def cut(self, layers: int) -> Config:
        """The first layers alone, in their full width."""
        listed = ("layer_types", "layers_block_type", "mlp_layer_types")
        kinds = {key: self.config[key][:layers] for key in listed if key in self.config}
        return {**self.config, "num_hidden_layers": layers, **kinds}

    def shrunk(self) -> Config:
        """All options with small sizes."""
        return {**self.config, **_TOKENS, **self.small}


_TOKENS: Config = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SLIDING = {"s": "sliding_attention", "f": "full_attention", "l": "linear_attention", "c": "conv"}
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}


def _kinds(letters: str, names: Mapping[str, str] = _SLIDING) -> list[str]:
    return [names[letter] for letter in letters]


_MLA_HEADS: Config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_act": "silu", "attention_bias": False}
_SMALL_MLA: Config = {
    **{"hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 20, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3},
}

REAL_MODELS: Mapping[str, RealModel] = {
    "gpt-oss-20b": RealModel(
        config={
            **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088},
            **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
            **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0},
            **{"layer_types": _kinds("sf" * 12), "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
            **{"hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0},
        },
        small={
            **{"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 8, "num_key_value_heads": 1},
            **{"head_dim": 16, "num_local_experts": 6, "num_hidden_layers": 2, "layer_types": _kinds("sf")},
            "sliding_window": 8,
        },
    ),
    "qwen3.5-35b-a3b": RealModel(
        config={
            **{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "vocab_size": 248320, "num_hidden_layers": 40},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": True},
            **{"layer_types": _kinds("lllf" * 10), "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
            **{"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32},
            **{"linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": 262144, "hidden_act": "silu", "attention_bias": False, "mlp_only_layers": []},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": False,
        },
        small={
            **{"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32},
            **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4},
            **{"linear_value_head_dim": 8, "num_experts": 10, "num_experts_per_tok": 4, "moe_intermediate_size": 16},
            **{"shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "layer_types": _kinds("lllf")},
        },
    ),
    "gemma-4-26b-a4b": RealModel(
        config={
            **{"model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "vocab_size": 262144},
            **{"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
            **{"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
            **{"layer_types": _kinds("sssssf" * 5), "sliding_window": 1024, "enable_moe_block": True},
            **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "num_kv_shared_layers": 0},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": False},
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **{"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": 262144, "attention_bias": False, "tie_word_embeddings": True},
            "use_bidirectional_attention": "vision",
        },
        small={
            **{"hidden_size": 48, "intermediate_size": 36, "num_attention_heads": 8, "num_key_value_heads": 4},
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 8},
            **{"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20, "vocab_size_per_layer_input": 61},
            **{"num_hidden_layers": 6, "layer_types": _kinds("sssssf")},
        },
    ),
    "gemma-3n-e4b": RealModel(
        config={
            **{"model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": [16384] * 35},
            **{"vocab_size": 262400, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
            **{"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
            **{"layer_types": _kinds("ssssf" * 7), "sliding_window": 512, "num_kv_shared_layers": 15},
            **{"altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4},
            **{"laurel_rank": 64, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25},
            **{"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None},
            **{"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": 32768, "attention_bias": False, "tie_word_embeddings": True},
        },
        small={
            **{"hidden_size": 48, "intermediate_size": [40] * 10, "num_attention_heads": 4, "num_key_value_heads": 1},
            **{"head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 5, "laurel_rank": 6},
            **{"activation_sparsity_pattern": [0.95] * 3 + [0.0] * 7, "vocab_size_per_layer_input": 61},
            **{"hidden_size_per_layer_input": 8, "num_hidden_layers": 10, "layer_types": _kinds("ssssf" * 2)},
        },
    ),
    "lfm2-8b-a1b": RealModel(
        config={
            **{"model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "vocab_size": 65536},
            **{"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3},
            **{"layer_types": _kinds("ccfcccfcccfcccfcccfccfcc"), "conv_bias": False, "num_dense_layers": 2},
            **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "use_expert_bias": True},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "norm_eps": 1e-5, "rope_theta": 1000000.0},
            **{"max_position_embeddings": 128000, "tie_word_embeddings": True},
        },
        small={
            **{"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 1},
            **{"num_experts": 6, "moe_intermediate_size": 20, "num_hidden_layers": 4, "layer_types": _kinds("ccfc")},
        },
    ),
    "deepseek-v2-lite": RealModel(
        config={
            **{**_MLA_HEADS, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944},
            **{"vocab_size": 102400, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
            **{"q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128, "rms_norm_eps": 1e-6},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_layer_freq": 1},
            **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": False, "n_group": 1},
            **{"topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 1.0},
            "rope_scaling": {
                **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707},
                **{"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
            },
            **{"rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False},
        },
        small=_SMALL_MLA,
    ),
    "glm-4.7-flash": RealModel(
        config={
            **{**_MLA_HEADS, "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240},
            **{"vocab_size": 154880, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20},
            **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
            **{"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8},
            **{"moe_intermediate_size": 1536, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
            **{"mlp_layer_types": ["dense"] + ["sparse"] * 46, "rope_interleave": True},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            **{"max_position_embeddings": 202752, "tie_word_embeddings": False},
        },
        small={**_SMALL_MLA, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek-v3": RealModel(
        config={
            **{**_MLA_HEADS, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432},
            **{"vocab_size": 129280, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
            **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "rms_norm_eps": 1e-6},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1},
            **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "norm_topk_prob": True, "n_group": 8},
            **{"topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
            "rope_scaling": {
                **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
            },
            **{"rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False},
        },
        small={
            **{**_SMALL_MLA, "q_lora_rank": 24, "n_routed_experts": 16, "num_experts_per_tok": 6},
            **{"num_hidden_layers": 4},
        },
    ),
    "nemotron-3-nano": RealModel(
        config={
            **{"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "vocab_size": 131072},
            **{"num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
            "layers_block_type": _kinds("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", _BLOCKS),
            **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
            **{"expand": 2, "chunk_size": 128, "use_conv_bias": True, "mamba_proj_bias": False, "use_bias": False},
            **{"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "mlp_bias": False, "attention_bias": False},
            **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "n_group": 1},
            **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "topk_group": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5},
            **{"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "sliding_window": None},
            **{"max_position_embeddings": 262144, "residual_in_fp32": False, "tie_word_embeddings": False},
        },
        small={
            **{"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 8, "num_key_value_heads": 1},
            **{"head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 16},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"moe_shared_expert_intermediate_size": 40, "num_hidden_layers": 6},
            "layers_block_type": _kinds("MEMEM*", _BLOCKS),
        },
    ),
}
