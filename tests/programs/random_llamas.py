"""config.json of random tiny models that are Llamas with few differences, and of their mixtures of experts."""

from collections.abc import Callable

from tests.programs.random_draw import POSITIONS, Config, Draw


def _llama(*, biases: bool = True, **own: object) -> Callable[[Draw], Config]:
    """A Llama whose heads divide its width, with these keys of its own."""

    def config(draw: Draw) -> Config:
        switches = {"attention_bias": draw.yes(), "mlp_bias": draw.yes()} if biases else {}
        return {**draw.dense(), **draw.evenly(), **switches, "num_hidden_layers": 2, **own}

    return config


def _bitnet(draw: Draw) -> Config:
    return {**_llama(biases=False)(draw), "attention_bias": draw.yes()}


def _nanochat(draw: Draw) -> Config:
    cap = {"final_logit_softcapping": draw.choice((None, 2.0, 15.0))}
    return {**_wide_heads(draw), **cap, "attention_bias": draw.yes()}


def _olmo(draw: Draw) -> Config:
    config = {key: value for key, value in _llama(biases=False)(draw).items() if key != "rms_norm_eps"}
    return {**config, "attention_bias": draw.yes()}


def _wide_heads(draw: Draw) -> Config:
    return {**draw.dense(), **draw.heads(), "num_hidden_layers": 2}


def _layer_norms(draw: Draw) -> Config:
    config = {key: value for key, value in _llama()(draw).items() if key != "rms_norm_eps"}
    return {**config, "layer_norm_eps": draw.choice((1e-5, 1e-3))}


def _phi(draw: Draw) -> Config:
    config = {key: value for key, value in _layer_norms(draw).items() if not key.endswith("_bias")}
    return {**config, "tie_word_embeddings": False, "rope_parameters": _part(draw)}


def _part(draw: Draw) -> Config:
    return draw.rope(partial_rotary_factor=draw.choice((0.5, 1.0)))


def _stablelm(draw: Draw) -> Config:
    parallel = {"use_parallel_residual": draw.yes(), "use_qkv_bias": draw.yes()}
    return {**_phi(draw), **parallel, "hidden_act": "silu"}


def _nemotron(draw: Draw) -> Config:
    config = {key: value for key, value in _llama()(draw).items() if key != "rms_norm_eps"}
    return {**config, "norm_eps": draw.choice((1e-5, 1e-3)), "rope_parameters": _part(draw)}


def _glm(draw: Draw) -> Config:
    return {**_wide_heads(draw), "attention_bias": draw.yes(), "head_dim": draw.choice((16, 24)), "pad_token_id": 0}


def _windows(draw: Draw) -> Config:
    layers = draw.mix(("sliding_attention", "full_attention"), draw.choice((2, 3, 4)))
    kinds = {"layer_types": layers, "num_hidden_layers": len(layers)}
    return {**_wide_heads(draw), **kinds, "sliding_window": draw.choice((4, 8, 30))}


def _windows_evenly(draw: Draw) -> Config:
    """Windows, and heads that divide the width, as some types of transformers want it."""
    return {**_windows(draw), **draw.evenly(), "head_dim": draw.choice((8, 16, 24))}


def _gemma2(draw: Draw) -> Config:
    caps = {"attn_logit_softcapping": draw.choice((None, 2.0)), "final_logit_softcapping": draw.choice((None, 30.0))}
    return {
        **_windows_evenly(draw),
        **caps,
        "query_pre_attn_scalar": draw.choice((16, 24)),
        "tie_word_embeddings": True,
    }


def _gemma3(draw: Draw) -> Config:
    ropes = {"sliding_attention": draw.rope(), "full_attention": draw.rope()}
    return {**_gemma2(draw), "attn_logit_softcapping": None, "rope_parameters": ropes}


def _mistral(draw: Draw) -> Config:
    return {**_wide_heads(draw), "sliding_window": draw.choice((None, 4, 8, 30))}


def _qwen2(draw: Draw) -> Config:
    window = {"use_sliding_window": draw.yes(), "sliding_window": draw.choice((4, 8)), "max_window_layers": 1}
    return {**_llama(biases=False)(draw), **window}


def _qwen3(draw: Draw) -> Config:
    return {**_qwen2(draw), **draw.heads(), "attention_bias": draw.yes()}


def _gpt2(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4, 8))
    width = {"n_embd": heads * draw.choice((8, 12, 16)), "n_head": heads, "n_layer": 2, "n_positions": POSITIONS}
    return {**width, "n_inner": draw.choice((None, 20, 33)), "tie_word_embeddings": draw.yes()}


def _gptj(draw: Draw) -> Config:
    return {**_gpt2(draw), "rotary_dim": draw.choice((2, 4, 8)), "tie_word_embeddings": False}


def _codegen(draw: Draw) -> Config:
    heads = draw.choice((4, 8))
    return {**_gptj(draw), "n_head": heads, "n_embd": heads * draw.choice((8, 12))}


def _gpt_neo(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4, 8))
    kinds = [draw.choice(("global", "local")) for _ in range(3)]
    return {
        **{"hidden_size": heads * draw.choice((8, 12)), "num_heads": heads, "num_layers": 3},
        **{"attention_types": [[kinds, 1]], "window_size": draw.choice((4, 8, 30))},
        **{"intermediate_size": draw.choice((None, 20, 33)), "tie_word_embeddings": draw.yes()},
    }


def _gpt_neox(draw: Draw) -> Config:
    heads = draw.choice((1, 3, 4))
    return {
        **{"hidden_size": heads * draw.choice((8, 16)), "num_attention_heads": heads, "num_hidden_layers": 2},
        **{"intermediate_size": draw.size(), "use_parallel_residual": draw.yes(), "attention_bias": draw.yes()},
        **{"tie_word_embeddings": draw.yes(), "rope_parameters": _part(draw)},
    }


def _minicpm(draw: Draw) -> Config:
    factors = {"scale_emb": draw.choice((1, 3, 12)), "scale_depth": draw.choice((0.7, 1.4))}
    return {**_llama(biases=False)(draw), **factors, "dim_model_base": draw.choice((8, 24))}


def _hyperclovax(draw: Draw) -> Config:
    factors = {"embedding_multiplier": draw.choice((1.0, 3.0)), "residual_multiplier": draw.choice((0.4, 1.0))}
    return {**_llama()(draw), **factors, "logits_scaling": draw.choice((0.2, 1.0)), "use_post_norm": draw.yes()}


def _mixture(draw: Draw) -> Config:
    inner = {"moe_intermediate_size": draw.choice((12, 16, 33)), "norm_topk_prob": draw.yes()}
    return {**_wide_heads(draw), **draw.experts(), **inner, "num_hidden_layers": 3}


def _mixtral(draw: Draw) -> Config:
    return {**_mistral(draw), **draw.experts("num_local_experts")}


def _qwen3_moe(draw: Draw) -> Config:
    layers = {"decoder_sparse_step": draw.choice((1, 2)), "mlp_only_layers": draw.choice(([], [0]))}
    return {**_mixture(draw), **layers, "attention_bias": draw.yes()}


def _mellum(draw: Draw) -> Config:
    windows, mixture = _windows(draw), _mixture(draw)
    kinds = [draw.choice(("dense", "sparse")) for _ in windows["layer_types"]]
    ropes = {"sliding_attention": draw.rope(), "full_attention": draw.yarn() if draw.yes() else draw.rope()}
    return {**mixture, **windows, "mlp_layer_types": kinds, "rope_parameters": ropes}


def _flint(draw: Draw) -> Config:
    shared = {"shared_expert_intermediate_size": draw.size(), "mlp_only_layers": draw.choice(([], [0]))}
    return {**_mixture(draw), **_windows(draw), **shared}


def _afmoe(draw: Draw) -> Config:
    shared = {"num_shared_experts": draw.choice((1, 2)), "num_dense_layers": draw.choice((0, 1))}
    factors = {"route_scale": draw.choice((1.0, 2.5)), "mup_enabled": draw.yes(), "attention_bias": draw.yes()}
    return {**_mixture(draw), **_windows(draw), **shared, **factors}


def _grouped(draw: Draw) -> Config:
    return {**_windows(draw), **draw.groups(), "first_k_dense_replace": draw.choice((0, 1))}


def _exaone_moe(draw: Draw) -> Config:
    config = {**_windows(draw), **draw.groups("num_experts"), "first_k_dense_replace": 1}
    return {**config, "num_shared_experts": config.pop("n_shared_experts")}


def _solar_open(draw: Draw) -> Config:
    return {**_wide_heads(draw), **draw.groups(), "attention_bias": draw.yes()}


def _sarvam_moe(draw: Draw) -> Config:
    return {**_solar_open(draw), "use_qk_norm": draw.yes(), "first_k_dense_replace": draw.choice((0, 1))}


def _olmoe(draw: Draw) -> Config:
    return {**_llama(biases=False)(draw), **draw.experts(), "norm_topk_prob": draw.yes()}


def _granitemoe(draw: Draw) -> Config:
    factors = {"embedding_multiplier": draw.choice((1.0, 3.0)), "attention_multiplier": draw.choice((0.1, 0.2))}
    return {**_llama(biases=False)(draw), **factors, **draw.experts("num_local_experts")}


def _granitemoeshared(draw: Draw) -> Config:
    return {**_granitemoe(draw), "shared_intermediate_size": draw.choice((0, 20, 33))}


def _youtu(draw: Draw) -> Config:
    return {**draw.dense(), **draw.latent(), "num_hidden_layers": 2, "attention_bias": draw.yes()}


def _minicpm3(draw: Draw) -> Config:
    factors = {"scale_emb": draw.choice((1, 3, 12)), "dim_model_base": draw.choice((8, 24))}
    return {**_youtu(draw), **factors, "attention_bias": False}


DRAWS: dict[str, Callable[[Draw], Config]] = {
    "afmoe": _afmoe,
    "arcee": _llama(),
    "bitnet": _bitnet,
    "codegen": _codegen,
    "cwm": _windows_evenly,
    "dots1": _grouped,
    "exaone": _llama(),
    "exaone_moe": _exaone_moe,
    "flex_olmo": _olmoe,
    "flint": _flint,
    "gemma": _wide_heads,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoeshared,
    "hyperclovax": _hyperclovax,
    "internlm2": _llama(biases=False),
    "jais2": _layer_norms,
    "llama": _llama(),
    "mellum": _mellum,
    "mimo": _qwen2,
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "ministral": _windows,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _llama(biases=False),
    "olmoe": _olmoe,
    "orion": _llama(biases=False),
    "phi": _phi,
    "phi3": _llama(biases=False),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "sarvam_moe": _sarvam_moe,
    "seed_oss": _wide_heads,
    "solar_open": _solar_open,
    "stablelm": _stablelm,
    "vaultgemma": _gemma2,
    "youtu": _youtu,
}
