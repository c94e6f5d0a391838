"""config.json of random tiny models whose layers keep states, and of Granite."""

from tests.programs.random_draw import Config, Draw


def granite(draw: Draw) -> Config:
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


def _mamba(draw: Draw) -> Config:
    return {
        "mamba_n_groups": draw.choice((1, 2)),
        "mamba_d_state": draw.choice((8, 16, 24)),
        "mamba_d_conv": draw.choice((3, 4)),
        "mamba_chunk_size": 16,
        "mamba_conv_bias": draw.yes(),
        "mamba_proj_bias": draw.yes(),
    }


def granitemoehybrid(draw: Draw) -> Config:
    config = {**granite(draw), "mlp_bias": False, "attention_bias": False}
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
        **_mamba(draw),
        "position_embedding_type": draw.choice(("rope", "nope")),
    }


def bamba(draw: Draw) -> Config:
    config = {**draw.dense(), **draw.evenly()}
    layers = draw.mix(("linear_attention", "full_attention"), draw.choice((2, 3, 5)))
    return {
        **config,
        "num_hidden_layers": len(layers),
        "attn_layer_indices": [layer for layer, kind in enumerate(layers) if kind == "full_attention"],
        "mamba_n_heads": config["hidden_size"] // 4,
        "mamba_d_head": 8,
        **_mamba(draw),
        "attention_bias": draw.yes(),
        "mlp_bias": draw.yes(),
        "rope_parameters": draw.rope(partial_rotary_factor=draw.choice((0.5, 1.0))),
    }


def falcon_h1(draw: Draw) -> Config:
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


def nemotron_h(draw: Draw) -> Config:
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


def lfm2(draw: Draw) -> Config:
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


def lfm2_moe(draw: Draw) -> Config:
    return {
        **lfm2(draw),
        **draw.experts(),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "num_dense_layers": draw.choice((0, 1)),
        "use_expert_bias": draw.yes(),
        "norm_topk_prob": draw.yes(),
        "routed_scaling_factor": draw.choice((1.0, 1.5)),
    }


def qwen3_5(draw: Draw, counts: tuple[int, ...] = (2, 3, 5)) -> Config:
    """counts: of layers."""
    keys = draw.choice((1, 2, 3))
    layers = draw.mix(("linear_attention", "full_attention"), draw.choice(counts))
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


def qwen3_5_moe(draw: Draw) -> Config:
    """Of few layers: in five, with 2 of 17 experts, noise of half a percent in the matrices moves transformers' logits
    by 0.2 to 0.3 of their spread, because a third of the tokens gets other experts. No bound of codes fits that."""
    return {
        **qwen3_5(draw, (2, 3)),
        **draw.experts(),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "shared_expert_intermediate_size": draw.size(),
    }


def qwen3_next(draw: Draw) -> Config:
    return {
        **qwen3_5_moe(draw),
        "norm_topk_prob": draw.yes(),
        "decoder_sparse_step": draw.choice((1, 2)),
        "mlp_only_layers": draw.choice(([], [0])),
    }


def kimi_linear(draw: Draw) -> Config:
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
