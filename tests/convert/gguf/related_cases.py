"""Tiny models of `convert/gguf/related.py` and `combined.py` as llama.cpp's converter lays them."""

import numpy as np

from tests.convert.gguf import llama_cpp
from tests.convert.gguf.llama_cpp import Case, Settings, Tensors, pairs
from tests.convert.gguf.test_blocks import paired

FREE = {"layer_types": None, "use_sliding_window": False, "sliding_window": None}
IMAGES = {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 3}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
WINDOWS = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, False]}
SHARED = {"expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2}
EXAONE = {
    **{f"attn.attention.{name}_proj": f"attn_{name}" for name in "qkv"},
    "attn.attention.out_proj": "attn_output",
    "mlp.c_fc_0": "ffn_gate",
    "mlp.c_fc_1": "ffn_up",
}
INTERNLM2 = {
    "tok_embeddings": "token_embd",
    "attention.wo": "attn_output",
    "attention_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
FALCON = {**llama_cpp.BLOOM, "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm", "input_layernorm": "attn_norm"}
AFMOE = {
    "self_attn.gate_proj": "attn_gate",
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.expert_bias": "exp_probs_b.bias",
}
SHARED_MLP = {f"shared_mlp.{name}": f"ffn_{name}_shexp" for name in ("gate", "up")}
SHARED_MLP["shared_mlp.output_linear"] = "ffn_down_shexp"


def by_group(config: Settings, tensors: Tensors) -> Tensors:
    """InternLM 2: queries, keys and values apart, in pairs."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {}
    for name, value in tensors.items():
        if "wqkv" not in name:
            found[name] = value
            continue
        groups = value.reshape(kv_heads, heads // kv_heads + 2, -1, *value.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        q, k, v = (part.reshape(-1, *value.shape[1:]) for part in parts)
        for part, each in (("q", paired(q, heads)), ("k", paired(k, kv_heads)), ("v", v)):
            found[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = each
    return found


def falcon(config: Settings, tensors: Tensors) -> Tensors:
    """All queries, then all keys, then all values."""
    kv_heads, found = config["num_kv_heads"], dict(tensors)
    for name, value in tensors.items():
        if "query_key_value" in name:
            groups = value.reshape(kv_heads, config["num_attention_heads"] // kv_heads + 2, -1, *value.shape[1:])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            found[name] = np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])
    return found


def fused(config: Settings, tensors: Tensors) -> Tensors:
    """GLM-4 as its makers store it: queries, keys and values in one product."""
    found = {name: value for name, value in tensors.items() if not any(f".{each}_proj." in name for each in "qkv")}
    for name in (name for name in tensors if ".q_proj." in name):
        found[name.replace("q_proj", "qkv_proj")] = np.concatenate(
            [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
        )
    return found


def plus_one(config: Settings, tensors: Tensors) -> Tensors:
    """Nemotron's layer norms, whose names are those of a Llama."""
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in tensors.items()}


def two_parts(config: Settings, tensors: Tensors) -> Tensors:
    """Granite's shared expert: gate and up apart."""
    found = pairs(config, tensors)
    for name in [name for name in found if "shared_mlp.input_linear" in name]:
        for part, value in zip(("gate", "up"), np.split(found.pop(name), 2), strict=True):
            found[name.replace("input_linear", part)] = value
    return found


def multiplied(config: Settings, tensors: Tensors) -> Tensors:
    """Falcon H1: all its factors in the weights, and Mamba 2 as in a Granite."""
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    gate, down = config["mlp_multipliers"]
    into, sizes = config["attention_in_multiplier"], (inner, inner, states, states, config["mamba_n_heads"])
    rows = config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], sizes)[:, None]
    factors = {
        **{"gate_proj": gate, "down_proj": down, "k_proj": config["key_multiplier"] * into, "q_proj": into},
        **{"v_proj": into, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"]},
        **{"in_proj": rows, "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"]},
    }
    found = llama_cpp.mamba(config, tensors, "mamba", config["mamba_n_groups"])
    for name, value in found.items():
        module = name.split(".")[-2]
        found[name] = (value * factors.get(module, 1.0)).astype(np.float32)
    return found


def kimi(config: Settings, tensors: Tensors) -> Tensors:
    """Kimi Linear: the latent's keys and values apart, A for its logarithm, convolutions with two more dimensions."""
    found = llama_cpp.absorbed(config, tensors)
    for name, value in found.items():
        if name.endswith("A_log"):
            found[name] = -np.exp(value)
        elif "conv1d" in name:
            found[name] = value.reshape(1, len(value), 1, -1)
    return found


def streams(config: Settings, tensors: Tensors) -> Tensors:
    """Gemma 3n: the products of all streams in one stack."""
    found = {name: value for name, value in tensors.items() if "altup_" not in name or "coefs" in name}
    for name in ("altup_projections", "altup_unembed_projections"):
        found[f"model.{name}.weight"] = np.stack([tensors[f"model.{name}.{i}.weight"] for i in range(3)])
    return found


FALCON_H1 = {
    **{f"mamba.{theirs}": ours for theirs, ours in llama_cpp.MAMBA.items()},
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "final_layernorm": "output_norm",
    "pre_ff_layernorm.weight": "ffn_norm",
}
SSM = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 32},
    "ssm.time_step_rank": 4,
}
KIMI = {
    **{f"self_attn.{each}_conv1d": f"ssm_conv1d_{each}" for each in "qkv"},
    **{f"self_attn.{each}_proj": f"ssm_{each}" for each in ("f_a", "f_b", "g_a", "g_b")},
    **{"self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm", "self_attn.A_log": "ssm_a"},
    **{"self_attn.dt_bias": "ssm_dt.bias", "block_sparse_moe.gate": "ffn_gate_inp"},
    **{
        f"{block}.shared_experts.{name}_proj": f"ffn_{name}_shexp"
        for block in ("block_sparse_moe", "mlp")
        for name in ("gate", "up", "down")
    },
    **{f"block_sparse_moe.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"{block}.gate.e_score_correction_bias": "exp_probs_b.bias" for block in ("block_sparse_moe", "mlp")},
}
MLA = {
    **{"attention.key_length": 28, "attention.key_length_mla": 20, "attention.value_length_mla": 10},
    **{"attention.kv_lora_rank": 20, "rope.dimension_count": 8},
}
GEMMA3N = {
    **{key: name for key, name in llama_cpp.GEMMA4.items() if "per_layer" in key},
    **{"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"},
    **{f"altup.{name}_coefs": f"altup_{name.removesuffix('ion')}_coef" for name in ("prediction", "correction")},
    **{"altup.correct_output_scale": "altup_correct_scale.weight", "altup.modality_router": "altup_router"},
    **{"altup.router_norm": "altup_router_norm", "laurel.post_laurel_norm": "laurel_post_norm"},
    **{"laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r"},
    **{"post_attention_layernorm": "post_attention_norm"},
}
MPT = {
    **{"wte": "token_embd", "norm_1": "attn_norm", "norm_2": "ffn_norm", "norm_f": "output_norm"},
    **{"attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output"},
    **{f"ffn.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
}
INDEXER = {
    **{"indexer.wq_b": "indexer.attn_q_b", "indexer.wk": "indexer.attn_k", "indexer.weights_proj": "indexer.proj"},
    "indexer.k_norm": "indexer.k_norm",
}
SPARSE = {
    **{**MLA, "attention.head_count_kv": 1, "attention.value_length": 20, "attention.q_lora_rank": 24},
    **{"attention.indexer.head_count": 4, "attention.indexer.key_length": 16, "attention.indexer.top_k": 72},
    **{"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 1.5},
    **{"expert_weights_norm": True, "expert_gating_func": 2},
}
YARN = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    "rope.scaling.yarn_log_multiplier": 0.1,
}
GRANITE = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0}
RELATED = {
    "qwen2vl": Case(family="qwen2", change=FREE, settings={"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3vl": Case(family="qwen3", change=FREE, settings=IMAGES),
    "qwen3vlmoe": Case(family="qwen3_moe", change={**FREE, "mlp_only_layers": []}, settings=IMAGES),
    "arcee": Case(family="arcee", change={"mlp_bias": True}, lay=pairs),
    "exaone": Case(family="exaone", names=EXAONE, settings={"rope.dimension_count": 12}),
    "exaone, older": Case(
        family="exaone",
        change={"tie_word_embeddings": True},
        names=EXAONE,
        settings={"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
    ),
    "internlm2": Case(family="internlm2", lay=by_group, names=INTERNLM2),
    "minicpm": Case(
        family="minicpm",
        lay=pairs,
        settings={"embedding_scale": 3.0, "residual_scale": 0.7 / 2**0.5, "logit_scale": 2.0},
    ),
    "orion": Case(
        family="orion",
        settings={
            **{"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
            **{"tensor_data_layout": "Meta AI original pth"},
        },
    ),
    "jais2": Case(family="jais2", settings={"rope.dimension_count": 16}),
    "nemotron": Case(
        family="nemotron",
        change={"attention_bias": True, "mlp_bias": True},
        lay=plus_one,
        settings={"rope.dimension_count": 8, "rope.scaling.type": "none", "attention.layer_norm_epsilon": 1e-5},
    ),
    "falcon": Case(
        family="falcon",
        lay=falcon,
        names=FALCON,
        settings={
            **{"attention.head_count_kv": 2, "feed_forward_length": 192, "context_length": 2048},
            **{"tensor_data_layout": "jploski"},
        },
    ),
    "falcon, 7B": Case(
        family="falcon",
        change={"num_kv_heads": 1, "num_ln_in_parallel_attn": 1, "bias": False, "tie_word_embeddings": False},
        lay=falcon,
        names=FALCON,
        settings={"attention.head_count_kv": 1, "feed_forward_length": 192, "context_length": 2048},
    ),
    "chatglm": Case(family="glm", lay=fused, settings={"rope.dimension_count": 8, "add_bos_token": False}),
    "chatglm, parts": Case(family="glm", change={"attention_bias": False}, settings={"rope.dimension_count": 8}),
    "mpt": Case(
        family="mpt",
        names=MPT,
        settings={
            **{"embedding_length": 48, "block_count": 2, "attention.head_count": 3, "context_length": 64},
            **{"feed_forward_length": 192, "attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 8.0},
        },
    ),
    "mpt, untied": Case(
        family="mpt",
        change={"tie_word_embeddings": False},
        names=MPT,
        settings={
            **{"embedding_length": 48, "block_count": 2, "attention.head_count": 3, "context_length": 64},
            **{"feed_forward_length": 192, "attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 8.0},
            "attention.head_count_kv": 3,
        },
    ),
    "olmo": Case(family="olmo", lay=pairs, settings={"attention.layer_norm_epsilon": 1e-5}),
    "deepseek": Case(
        family="deepseek",
        lay=pairs,
        settings={
            **{"rope.dimension_count": 12, "rope.scaling.type": "none", "expert_weights_scale": 1.0},
            **{"leading_dense_block_count": 1, "expert_shared_count": 2, "attention.key_length": 12},
            "feed_forward_length": 84,
        },
    ),
    "cohere2moe": Case(
        family="cohere2_moe",
        settings={
            **{**WINDOWS, "attention.sliding_window_pattern": [False, True, False], "logit_scale": 0.25},
            **{"rope.scaling.type": "none", "rope.dimension_count": 16, "expert_gating_func": 2},
            **{"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_shared_feed_forward_length": 40},
            **{"expert_weights_norm": True, "expert_feed_forward_length": 20},
        },
    ),
    "cohere2moe, plain": Case(
        family="cohere2_moe",
        change={"mlp_layer_types": ["sparse"] * 3, "num_shared_experts": 0, "norm_topk_prob": False},
        settings={
            **{**WINDOWS, "attention.sliding_window_pattern": [False, True, False], "logit_scale": 0.25},
            **{"rope.scaling.type": "none", "rope.dimension_count": 16, "expert_feed_forward_length": 20},
        },
    ),
    "mistral4": Case(
        family="mistral4",
        change={"n_group": 1, "topk_group": 1},
        lay=llama_cpp.absorbed,
        names={"experts.gate_up_proj": "ffn_gate_up_exps.weight"},
        settings={
            **{**SPARSE, **YARN, "expert_gating_func": 1, "attention.temperature_scale": 0.3},
            **dict.fromkeys(key for key in SPARSE if "indexer" in key),
            "attention.temperature_length": 16,
        },
    ),
    "deepseek32": Case(
        family="deepseek_v32",
        change={
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
                **{"mscale": 0.8, "mscale_all_dim": 0.8},
            }
        },
        lay=llama_cpp.absorbed,
        names=INDEXER,
        settings={
            **SPARSE,
            **{"expert_group_count": 4, "expert_group_used_count": 2, "rope.scaling.original_context_length": 32},
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.08},
        },
    ),
    "glm-dsa": Case(
        family="glm_moe_dsa",
        change={"mlp_layer_types": ["dense", "sparse", "sparse"]},
        lay=llama_cpp.absorbed,
        names=INDEXER,
        settings={**SPARSE, "attention.value_length_mla": 20, "attention.indexer.types": [True, False, True]},
    ),
    "afmoe": Case(
        family="afmoe",
        change={"num_hidden_layers": 4, "global_attn_every_n_layers": 4},
        names=AFMOE,
        settings={**SHARED, "leading_dense_block_count": 1, "attention.sliding_window": 16},
    ),
    "dots1": Case(
        family="dots1",
        change={"sliding_window": None, "n_group": 1, "topk_group": 1},
        settings={**SHARED, "leading_dense_block_count": 1, "expert_shared_count": 2},
    ),
    "exaone-moe": Case(
        family="exaone_moe",
        change={"num_hidden_layers": 3, "layer_types": KINDS, "n_group": 1, "topk_group": 1},
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
        settings={
            **{**SHARED, **WINDOWS, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 20},
            **{"rope.scaling.type": "none", "expert_weights_scale": 2.5},
        },
    ),
    "mellum": Case(
        family="mellum",
        change={
            **{"layer_types": KINDS, "mlp_layer_types": ["sparse"] * 3},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        settings={
            **{**WINDOWS, "rope.freq_base_swa": 1e4, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length": 16,
        },
    ),
    "granitemoe, shared": Case(
        family="granitemoeshared",
        settings={**GRANITE, "expert_shared_feed_forward_length": 44},
        lay=two_parts,
        names={**llama_cpp.GRANITE_EXPERTS, **SHARED_MLP},
    ),
    "falcon-h1": Case(family="falcon_h1", names=FALCON_H1, lay=multiplied, settings={**SSM, "ssm.group_count": 1}),
    "kimi-linear": Case(
        family="kimi_linear",
        change={"linear_num_heads": 4, "num_expert_group": 1, "topk_group": 1},
        names=KIMI,
        lay=kimi,
        settings={
            **{**MLA, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 20, "ssm.conv_kernel": 4},
            **{"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 2.446},
            **{"expert_gating_func": 2, "expert_used_count": 3, "context_length": 64},
        },
    ),
    "minicpm3": Case(
        family="minicpm3",
        change={"dim_model_base": 256, "scale_emb": 12, "scale_depth": 1.4, "v_head_dim": 12},
        settings={"attention.key_length": 20, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 20}
        | {"attention.value_length": None, "rope.dimension_count": 8},
    ),
    "deepseek2, no experts": Case(
        family="youtu",
        lay=llama_cpp.absorbed,
        settings={
            **{**MLA, "attention.head_count_kv": 1, "attention.value_length": 20, "attention.q_lora_rank": 24},
            **{"leading_dense_block_count": 2, "expert_shared_count": 0, "expert_feed_forward_length": 84},
        },
    ),
    "gemma3n": Case(
        family="gemma3n_text",
        change={"altup_num_inputs": 4},
        names=GEMMA3N,
        lay=streams,
        settings={
            **{"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False, False]},
            **{"rope.freq_base_swa": 1e4, "attention.shared_kv_layers": 1, "embedding_length_per_layer_input": 8},
            **{"altup.num_inputs": 4, "altup.active_idx": 0, "feed_forward_length": [84, 84, 84]},
            "activation_sparsity_scale": [0.5244005, float("-inf"), float("-inf")],
        },
    ),
}
