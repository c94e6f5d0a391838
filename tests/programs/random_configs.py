"""config.json of random tiny models: for each model type other shapes, mixes of layers and options at each draw."""

import random
from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
VOCAB, POSITIONS = 64, 256

_COMMON: Config = {
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


class Draw(random.Random):
    """What several types draw alike."""

    def yes(self) -> bool:
        return self.random() < 0.5

    def size(self) -> int:
        return self.choice((20, 33, 48, 61, 96))

    def heads(self, dims: tuple[int, ...] = (8, 12, 16, 24, 40)) -> Config:
        """Query heads for each key head from one to eight."""
        kv_heads = self.choice((1, 2, 3))
        return {
            "num_attention_heads": kv_heads * self.choice((1, 2, 3, 4, 7, 8)),
            "num_key_value_heads": kv_heads,
            "head_dim": self.choice(dims),
        }

    def evenly(self) -> Config:
        """Heads that divide the width."""
        kv_heads = self.choice((1, 2, 3))
        heads = kv_heads * self.choice((1, 2, 4))
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * self.choice((8, 12, 16)),
        }

    def dense(self) -> Config:
        return {
            "hidden_size": self.choice((32, 40, 72)),
            "intermediate_size": self.size(),
            "tie_word_embeddings": self.yes(),
            "rms_norm_eps": self.choice((1e-6, 1e-5, 1e-3)),
        }

    def mix(self, kinds: tuple[str, ...], count: int) -> list[str]:
        """Layers of random kinds, each of these at least once."""
        layers = [*kinds, *(self.choice(kinds) for _ in range(count - len(kinds)))]
        self.shuffle(layers)
        return layers

    def rope(self, **more: object) -> Config:
        return {"rope_type": "default", "rope_theta": self.choice((1e2, 1e4, 1e6)), **more}

    def yarn(self, **more: object) -> Config:
        return {
            **self.rope(),
            "rope_type": "yarn",
            "factor": self.choice((2.0, 4.0, 16.0)),
            "original_max_position_embeddings": self.choice((16, 32)),
            "beta_fast": self.choice((4.0, 32.0)),
            "beta_slow": 1.0,
            **more,
        }

    def experts(self, total: str = "num_experts", taken: str = "num_experts_per_tok") -> Config:
        count = self.choice((3, 4, 6, 9, 17))
        return {total: count, taken: self.randint(1, min(count, 4))}

    def groups(self, total: str = "n_routed_experts") -> Config:
        """Experts in groups, of which a token takes some."""
        groups, each = self.choice((1, 2, 4)), self.choice((2, 3, 4))
        top = self.randint(1, groups)
        return {
            total: groups * each,
            "n_group": groups,
            "topk_group": top,
            "num_experts_per_tok": self.randint(1, min(4, top * each)),
            "moe_intermediate_size": self.choice((12, 16, 33)),
            "n_shared_experts": self.choice((1, 2)),
            "routed_scaling_factor": self.choice((1.0, 2.5)),
            "norm_topk_prob": self.yes(),
        }

    def latent(self) -> Config:
        heads = self.choice((1, 3, 4, 8))
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": self.choice((None, 16, 27)),
            "kv_lora_rank": self.choice((16, 32, 48)),
            "qk_rope_head_dim": self.choice((8, 16)),
            "qk_nope_head_dim": self.choice((8, 12, 20)),
            "v_head_dim": self.choice((8, 10, 20)),
        }


def _granite(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.evenly(),
        "num_hidden_layers": 2,
        "embedding_multiplier": draw.choice((1.0, 3.0, 12.0)),
        "logits_scaling": draw.choice((1.0, 2.0, 8.0)),
        "residual_multiplier": draw.choice((0.2, 0.4, 1.0)),
        "attention_multiplier": draw.choice((0.1, 0.2)),
        "attention_bias": draw.yes(),
        "mlp_bias": draw.yes(),
    }


def _granitemoehybrid(draw: Draw) -> Config:
    config = {**_granite(draw), "mlp_bias": False, "attention_bias": False}
    width, dim = 2 * config["hidden_size"], draw.choice((8, 16))
    width += -width % (4 * dim)
    layers = draw.mix(("linear_attention", "full_attention"), draw.choice((2, 3, 5)))
    experts = draw.experts("num_local_experts") if draw.yes() else {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {
        **config,
        **experts,
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "shared_intermediate_size": draw.size(),
        "hidden_size": config["hidden_size"],
        "mamba_n_heads": 2 * config["hidden_size"] // 4,
        "mamba_d_head": 4,
        "mamba_expand": 2,
        "mamba_n_groups": draw.choice((1, 2)),
        "mamba_d_state": draw.choice((8, 16, 24)),
        "mamba_d_conv": draw.choice((3, 4)),
        "mamba_chunk_size": 16,
        "mamba_conv_bias": draw.yes(),
        "mamba_proj_bias": draw.yes(),
        "position_embedding_type": draw.choice(("rope", "nope")),
    }


def _falcon_h1(draw: Draw) -> Config:
    heads, dim = draw.choice((2, 4, 6)), draw.choice((8, 16))
    return {
        **draw.dense(),
        **draw.heads(),
        "num_hidden_layers": 2,
        "mamba_d_ssm": heads * dim,
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_n_groups": draw.choice((1, 2)),
        "mamba_d_state": draw.choice((8, 12, 16)),
        "mamba_d_conv": draw.choice((2, 4)),
        "mamba_chunk_size": 16,
        "mamba_rms_norm": draw.yes(),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": draw.yes(),
        "mamba_proj_bias": draw.yes(),
        "projectors_bias": draw.yes(),
        "attention_bias": draw.yes(),
        "mlp_bias": draw.yes(),
        "lm_head_multiplier": draw.choice((0.5, 1.0)),
        "embedding_multiplier": draw.choice((1.0, 2.0)),
        "mlp_multipliers": [0.8, draw.choice((0.7, 1.0))],
        "key_multiplier": draw.choice((0.6, 1.0)),
        "attention_out_multiplier": 0.9,
        "attention_in_multiplier": draw.choice((0.8, 1.0)),
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 0.6],
        "ssm_in_multiplier": draw.choice((1.0, 1.2)),
        "ssm_out_multiplier": 0.7,
    }


def _nemotron_h(draw: Draw) -> Config:
    kinds = ("linear_attention", "moe", "full_attention", "mlp")
    groups = draw.choice((1, 2))
    return {
        **draw.dense(),
        **draw.heads(),
        **draw.groups(),
        "layers_block_type": draw.mix(kinds, draw.choice((4, 6))),
        "ssm_state_size": draw.choice((8, 16)),
        "mamba_num_heads": groups * draw.choice((2, 3)),
        "mamba_head_dim": draw.choice((8, 12)),
        "n_groups": groups,
        "conv_kernel": draw.choice((3, 4)),
        "expand": 2,
        "chunk_size": 16,
        "time_step_min": 1e-8,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": draw.size(),
        "use_bias": draw.yes(),
        "attention_bias": draw.yes(),
        "mlp_bias": draw.yes(),
        "use_conv_bias": draw.yes(),
        "tie_word_embeddings": False,
    }


def _lfm2(draw: Draw) -> Config:
    layers = draw.mix(("conv", "full_attention"), draw.choice((2, 3, 5)))
    return {
        **draw.dense(),
        **draw.evenly(),
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "conv_bias": draw.yes(),
        "conv_L_cache": draw.choice((2, 3, 4)),
        "block_auto_adjust_ff_dim": draw.yes(),
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": draw.choice((1.0, 1.3)),
    }


def _lfm2_moe(draw: Draw) -> Config:
    return {
        **_lfm2(draw),
        **draw.experts(),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "num_dense_layers": draw.choice((0, 1)),
        "use_expert_bias": draw.yes(),
        "norm_topk_prob": draw.yes(),
        "routed_scaling_factor": draw.choice((1.0, 1.5)),
    }


def _qwen3_5(draw: Draw) -> Config:
    keys = draw.choice((1, 2, 3))
    layers = draw.mix(("linear_attention", "full_attention"), draw.choice((2, 3, 5)))
    return {
        **draw.dense(),
        **draw.heads((16, 24, 32)),
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((8, 12, 16)),
        "linear_value_head_dim": draw.choice((8, 12, 20)),
        "linear_conv_kernel_dim": draw.choice((3, 4)),
        "attention_bias": draw.yes(),
        "rope_parameters": draw.rope(partial_rotary_factor=draw.choice((0.25, 0.5, 1.0))),
    }


def _qwen3_5_moe(draw: Draw) -> Config:
    return {
        **_qwen3_5(draw),
        **draw.experts(),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "shared_expert_intermediate_size": draw.size(),
    }


def _qwen3_next(draw: Draw) -> Config:
    return {
        **_qwen3_5_moe(draw),
        "norm_topk_prob": draw.yes(),
        "decoder_sparse_step": draw.choice((1, 2)),
        "mlp_only_layers": draw.choice(([], [0])),
    }


def _kimi_linear(draw: Draw) -> Config:
    layers = draw.mix(("linear_attention", "full_attention"), draw.choice((2, 3, 4)))
    return {
        **draw.dense(),
        **draw.latent(),
        **draw.experts(taken="num_experts_per_token"),
        "moe_intermediate_size": draw.choice((12, 16)),
        "num_shared_experts": draw.choice((1, 2)),
        "routed_scaling_factor": draw.choice((1.0, 2.446)),
        "num_expert_group": 1,
        "topk_group": 1,
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(layers) - 1),
        "linear_head_dim": draw.choice((8, 16)),
        "linear_num_heads": draw.choice((2, 3, 4)),
        "linear_conv_kernel_dim": draw.choice((3, 4)),
        "q_lora_rank": None,
        "tie_word_embeddings": False,
    }


def _gemma4(draw: Draw) -> Config:
    layers = draw.mix(("sliding_attention", "full_attention"), draw.choice((3, 5, 6)))
    layers[-1] = "full_attention"
    layers[0] = "sliding_attention"
    experts, heads = draw.yes(), draw.heads((8, 16, 24))
    shares = 0
    if not experts and draw.yes():
        shares = min(len(layers) - 1 - layers.index("full_attention"), 2)
    config = {
        **draw.dense(),
        **heads,
        "global_head_dim": draw.choice((16, 32)),
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "sliding_window": draw.choice((4, 8, 30)),
        "rope_parameters": {
            "sliding_attention": draw.rope(),
            "full_attention": draw.rope(rope_type="proportional", partial_rotary_factor=draw.choice((0.25, 0.5, 1.0))),
        },
        "final_logit_softcapping": draw.choice((None, 4.0, 30.0)),
        "hidden_size_per_layer_input": draw.choice((0, 8, 20)),
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": max(shares, 0),
        "use_double_wide_mlp": draw.yes(),
        "attention_k_eq_v": draw.yes(),
        "num_global_key_value_heads": draw.choice((None, 1)),
        "tie_word_embeddings": True,
        "enable_moe_block": experts,
    }
    if experts:
        config |= {**draw.experts(taken="top_k_experts"), "moe_intermediate_size": draw.choice((12, 16))}
    return config


def _gpt_oss(draw: Draw) -> Config:
    layers = draw.mix(("sliding_attention", "full_attention"), draw.choice((2, 3, 4)))
    return {
        **draw.dense(),
        **draw.heads(),
        **draw.experts("num_local_experts"),
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "sliding_window": draw.choice((4, 8, 30)),
        "rope_parameters": draw.yarn(truncate=draw.yes()),
        "swiglu_limit": draw.choice((1.5, 7.0)),
        "attention_bias": True,
    }


def _windows(draw: Draw) -> Config:
    layers = draw.mix(("sliding_attention", "full_attention"), draw.choice((2, 3, 4)))
    return {
        **draw.dense(),
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "sliding_window": draw.choice((4, 8, 30)),
    }


def _olmo3(draw: Draw) -> Config:
    full = draw.yarn() if draw.yes() else draw.rope()
    rope = {"sliding_attention": draw.rope(), "full_attention": full}
    return {**_windows(draw), **draw.evenly(), "rope_parameters": rope, "attention_bias": draw.yes()}


def _exaone4(draw: Draw) -> Config:
    return {**_windows(draw), **draw.heads(), "rope_parameters": draw.rope()}


def _cohere2(draw: Draw) -> Config:
    return {
        **_windows(draw),
        **draw.heads(),
        "layer_norm_eps": draw.choice((1e-5, 1e-3)),
        "logit_scale": draw.choice((0.0625, 0.25, 1.0)),
        "attention_bias": draw.yes(),
        "rope_parameters": draw.rope(),
    }


def _smollm3(draw: Draw) -> Config:
    layers = draw.choice((2, 3, 5))
    return {
        **draw.dense(),
        **draw.evenly(),
        "num_hidden_layers": layers,
        "no_rope_layers": [draw.choice((0, 1)) for _ in range(layers)],
        "attention_bias": draw.yes(),
        "mlp_bias": draw.yes(),
        "use_sliding_window": False,
    }


def _ministral3(draw: Draw) -> Config:
    rope = draw.yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=draw.choice((0.1, 0.3)))
    return {
        **draw.dense(),
        **draw.heads(),
        "num_hidden_layers": 2,
        "sliding_window": None,
        "rope_parameters": {**rope, "type": "yarn"},
    }


def _qwen2_moe(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.evenly(),
        **draw.experts(),
        "num_hidden_layers": 3,
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "shared_expert_intermediate_size": draw.size(),
        "norm_topk_prob": draw.yes(),
        "decoder_sparse_step": draw.choice((1, 2)),
        "mlp_only_layers": draw.choice(([], [0])),
        "qkv_bias": draw.yes(),
    }


def _glm4_moe(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.heads((16, 24)),
        **draw.groups(),
        "num_hidden_layers": 3,
        "first_k_dense_replace": draw.choice((0, 1, 2)),
        "use_qk_norm": draw.yes(),
        "attention_bias": draw.yes(),
        "rope_parameters": draw.rope(partial_rotary_factor=0.5),
    }


def _hy_v3(draw: Draw) -> Config:
    layers = draw.choice((2, 3))
    return {
        **draw.dense(),
        **draw.heads(),
        **draw.experts(),
        "num_hidden_layers": layers,
        "num_shared_experts": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "router_scaling_factor": draw.choice((1.0, 2.0)),
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }


def _minimax_m2(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.heads((16, 24)),
        **draw.experts("num_local_experts"),
        "intermediate_size": draw.choice((12, 16, 33)),
        "num_hidden_layers": 2,
        "rope_parameters": draw.rope(partial_rotary_factor=draw.choice((0.5, 1.0))),
    }


def _deepseek_v3(draw: Draw) -> Config:
    scales = draw.choice((0.707, 1.0))
    rope = draw.yarn(mscale=draw.choice((scales, 1.0)), mscale_all_dim=scales) if draw.yes() else draw.rope()
    return {
        **draw.dense(),
        **draw.latent(),
        **draw.groups(),
        "num_hidden_layers": 3,
        "first_k_dense_replace": draw.choice((0, 1, 2)),
        "rope_parameters": rope,
        "rope_interleave": draw.yes(),
        "attention_bias": draw.yes(),
    }


def _deepseek_v2(draw: Draw) -> Config:
    config = {**_deepseek_v3(draw), "norm_topk_prob": False, "topk_method": "greedy"}
    del config["rope_interleave"]
    if config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    return config


def _glm4_moe_lite(draw: Draw) -> Config:
    config = {**_deepseek_v3(draw), "rope_parameters": draw.rope(), "q_lora_rank": draw.choice((16, 27))}
    del config["first_k_dense_replace"]
    return {**config, "mlp_layer_types": ["dense", "sparse", "sparse"]}


def _glm_moe_dsa(draw: Draw) -> Config:
    rope_dim = draw.choice((8, 16))
    return {
        **_glm4_moe_lite(draw),
        "qk_rope_head_dim": rope_dim,
        "rope_interleave": True,
        "index_topk": draw.choice((128, 200)),
        "index_head_dim": rope_dim + 8,
        "index_n_heads": draw.choice((2, 16)),
    }


def _bloom(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4, 6, 8, 12))
    return {"hidden_size": heads * draw.choice((8, 12)), "n_head": heads, "n_layer": 2, "seq_length": POSITIONS}


def _mpt(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4, 6, 8, 12))
    attention: Config = {"softmax_scale": draw.choice((None, 0.4))}
    return {
        "d_model": heads * draw.choice((8, 12)),
        "n_heads": heads,
        "n_layers": 2,
        "max_seq_len": POSITIONS,
        "attn_config": attention,
        "tie_word_embeddings": draw.yes(),
    }


def _falcon(draw: Draw) -> Config:
    heads, new, alibi = draw.choice((2, 4, 6)), draw.yes(), draw.yes()
    config: Config = {
        "hidden_size": heads * draw.choice((8, 12)),
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "new_decoder_architecture": new,
        "bias": draw.yes(),
        "alibi": alibi,
        "tie_word_embeddings": draw.yes(),
        "parallel_attn": True,
    }
    if new:
        return {**config, "num_kv_heads": draw.choice((1, 2)), "num_ln_in_parallel_attn": draw.choice((None, 1, 2))}
    return {**config, "multi_query": draw.yes(), "parallel_attn": draw.yes(), "num_kv_heads": None}


def _opt(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4))
    return {
        "hidden_size": heads * draw.choice((8, 12)),
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "ffn_dim": draw.size(),
        "enable_bias": draw.yes(),
        "tie_word_embeddings": draw.yes(),
    }


DRAWS: dict[str, Callable[[Draw], Config]] = {
    "bloom": _bloom,
    "cohere2": _cohere2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "falcon_h1": _falcon_h1,
    "gemma4_text": _gemma4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoehybrid": _granitemoehybrid,
    "hy_v3": _hy_v3,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "minimax_m2": _minimax_m2,
    "ministral3": _ministral3,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "olmo3": _olmo3,
    "opt": _opt,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "smollm3": _smollm3,
}


def random_config(model_type: str, seed: int) -> Config:
    """The same for the same seed."""
    drawn = DRAWS[model_type](Draw(f"{model_type} {seed}"))
    positions = {key: value for key, value in _COMMON.items() if key not in drawn}
    return {"model_type": model_type, **positions, **drawn}
