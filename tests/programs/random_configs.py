"""config.json of random tiny models: for each model type other shapes, mixes of layers and options at each draw."""

from collections.abc import Callable

from tests.programs import random_hybrids as hybrids
from tests.programs import random_latents as latents
from tests.programs import random_llamas as llamas
from tests.programs.random_draw import POSITIONS, VOCAB, Config, Draw

_COMMON: Config = {
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
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
        "hidden_size_per_layer_input": draw.choice((8, 20) if shares else (0, 8, 20)),  # transformers wants them
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


def _gemma4_unified(draw: Draw) -> Config:
    """Without embeddings of the layers, and without experts."""
    config = _gemma4(draw)
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts"):
        config.pop(key, None)
    return {key: each for key, each in config.items() if key not in ("top_k_experts", "moe_intermediate_size")}


def _gemma3n(draw: Draw) -> Config:
    layers = draw.mix(("sliding_attention", "full_attention"), draw.choice((3, 4)))
    shared = draw.choice((0, 1, 2))
    return {
        **draw.dense(),
        **draw.evenly(),
        "head_dim": draw.choice((8, 16, 24)),
        "layer_types": [*layers, *(draw.choice(tuple(layers)) for _ in range(shared))],
        "num_hidden_layers": len(layers) + shared,
        "num_kv_shared_layers": shared,
        "sliding_window": draw.choice((4, 8, 30)),
        "rope_parameters": {"sliding_attention": draw.rope(), "full_attention": draw.rope()},
        "final_logit_softcapping": draw.choice((4.0, 30.0)),
        "hidden_size_per_layer_input": draw.choice((8, 20)),
        "vocab_size_per_layer_input": VOCAB,
        "altup_num_inputs": draw.choice((2, 3, 4, 5)),
        "altup_correct_scale": draw.yes(),
        "laurel_rank": draw.choice((1, 4, 9)),
        "activation_sparsity_pattern": [draw.choice((0.0, 0.5, 0.95)) for _ in range(len(layers) + shared)],
        "tie_word_embeddings": True,
    }


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


def _cohere2_moe(draw: Draw) -> Config:
    config = _cohere2(draw)
    layers, first = int(str(config["num_hidden_layers"])), draw.choice((0, 1))
    return {
        **config,
        **draw.experts(),
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "prefix_dense_intermediate_size": draw.size(),
        "prefix_dense_sliding_window_pattern": draw.choice((1, 2)),
        "intermediate_size": draw.choice((12, 16, 33)),
        "num_shared_experts": draw.choice((0, 1, 2)),
        "shared_expert_combination_strategy": draw.choice(("average", "sum")),
        "expert_selection_fn": draw.choice(("sigmoid", "softmax")),
        "norm_topk_prob": draw.yes(),
        "rms_norm_eps": draw.choice((None, 1e-5)),
    }


def _deepseek(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.evenly(),
        **draw.experts("n_routed_experts"),
        "num_hidden_layers": 3,
        "first_k_dense_replace": draw.choice((0, 1)),
        "moe_layer_freq": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "n_shared_experts": draw.choice((1, 2, None)),
        "norm_topk_prob": draw.yes(),
        "rope_parameters": draw.rope(),
    }


def _chatglm(draw: Draw) -> Config:
    heads = draw.heads((8, 12, 16, 24))
    return {
        "hidden_size": draw.choice((32, 40, 72)),
        "ffn_hidden_size": draw.size(),
        "num_layers": draw.choice((1, 2)),
        "padded_vocab_size": VOCAB,
        "num_attention_heads": heads["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": heads["num_key_value_heads"],
        "kv_channels": heads["head_dim"],
        "seq_length": POSITIONS,
        "layernorm_epsilon": draw.choice((1e-6, 1e-5, 1e-3)),
        "add_qkv_bias": draw.yes(),
        "rope_ratio": draw.choice((1, 50, 500)),
        "tie_word_embeddings": draw.yes(),
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


def _ernie4_5_moe(draw: Draw) -> Config:
    return {
        **draw.dense(),
        **draw.heads((16, 24)),
        **draw.experts("moe_num_experts", "moe_k"),
        "num_hidden_layers": 3,
        "moe_layer_start_index": draw.choice((0, 1)),
        "moe_layer_end_index": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((12, 16, 33)),
        "moe_num_shared_experts": draw.choice((1, 2)),
        "moe_norm_min": draw.choice((1e-12, 0.6)),
        "use_bias": draw.yes(),
        "rope_parameters": draw.rope(),
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
        "word_embed_proj_dim": draw.choice((None, 16, 40)),
        "do_layer_norm_before": draw.yes(),
    }


DRAWS: dict[str, Callable[[Draw], Config]] = {
    **llamas.DRAWS,
    "bamba": hybrids.bamba,
    "bloom": _bloom,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "cohere2_moe": _cohere2_moe,
    "deepseek": _deepseek,
    "deepseek_v2": latents.deepseek_v2,
    "deepseek_v3": latents.deepseek_v3,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "falcon_h1": hybrids.falcon_h1,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4_unified,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": latents.glm4_moe_lite,
    "glm_moe_dsa": latents.glm_moe_dsa,
    "gpt_oss": _gpt_oss,
    "granite": hybrids.granite,
    "granitemoehybrid": hybrids.granitemoehybrid,
    "hy_v3": _hy_v3,
    "kimi_k2": latents.deepseek_v3,
    "kimi_linear": hybrids.kimi_linear,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "minimax_m2": _minimax_m2,
    "ministral3": _ministral3,
    "mistral4": latents.mistral4,
    "mpt": _mpt,
    "nemotron_h": hybrids.nemotron_h,
    "olmo3": _olmo3,
    "opt": _opt,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe_text": hybrids.qwen3_5_moe,
    "qwen3_5_text": hybrids.qwen3_5,
    "qwen3_next": hybrids.qwen3_next,
    "sarvam_mla": latents.deepseek_v3,
    "smollm3": _smollm3,
}


def random_config(model_type: str, seed: int) -> Config:
    """The same for the same seed."""
    drawn = DRAWS[model_type](Draw(f"{model_type} {seed}"))
    positions = {key: value for key, value in _COMMON.items() if key not in drawn}
    return {"model_type": model_type, **positions, **drawn}
