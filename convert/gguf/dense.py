"""Architectures of llama.cpp whose layers have attention and an MLP."""

import dataclasses

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture, Config, Stored
from ingot.convert.gguf.settings import has, layer_count, one_of_all, per_layer, require, rms_model, sizes


def llama(keys: Section, stored: Stored) -> Config:
    """A llama, or a mixture of experts, which the number of experts tells."""
    found = rms_model(keys, stored)
    one_of_all(keys)
    experts = keys.integer("expert_count", 0)
    taken = keys.integer("expert_used_count", 0)
    if not experts:
        return {"model_type": "llama", **found}
    return {"model_type": "mixtral", **found, "num_local_experts": experts, "num_experts_per_tok": taken}


def _twin(keys: Section, stored: Stored, model_type: str) -> Config:
    one_of_all(keys)
    for key in ("expert_count", "expert_used_count"):
        require(keys, key, 0)
    return {"model_type": model_type, **rms_model(keys, stored)}


def _gemma2(keys: Section, stored: Stored, model_type: str = "gemma2") -> Config:
    """The largest models scale scores by the hidden size; no setting says so, and llama.cpp goes by their layers."""
    found = _twin(keys, stored, model_type)
    hidden, heads = int(str(found["hidden_size"])), int(str(found["num_attention_heads"]))
    by_hidden = found["num_hidden_layers"] in (46, 62) and hidden // heads != found["head_dim"]
    found["query_pre_attn_scalar"] = hidden / heads if by_hidden else found["head_dim"]
    found["sliding_window"] = keys.integer("attention.sliding_window", 4096)
    found["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    found["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    return found


def _gemma3(keys: Section, stored: Stored) -> Config:
    caps = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    given = {key: keys.number(key) for key in caps if keys.has(key)}
    found = {**_gemma2(keys, stored, "gemma3_text"), "sliding_window_pattern": 6}
    if keys.has("attention.sliding_window_pattern"):
        found["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern")
    for key in caps:
        found[key] = given.get(key) or None
    require(keys, "attn_logit_softcapping", 0.0)
    if not keys.has("attention.sliding_window"):
        found["sliding_window"] = 1024
    found["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    if not keys.has("rope.freq_base"):
        found["rope_theta"] = 1000000.0
    return found


def _phi3(keys: Section, stored: Stored) -> Config:
    window = keys.integer("attention.sliding_window", 0)
    return {**_twin(keys, stored, "phi3"), "sliding_window": window or None}


def window_kinds(keys: Section, every: int, first: bool = False) -> list[str]:
    """layer_types. every: by default each so many-th layer sees all tokens; first: it is the first of these."""
    layers, key = layer_count(keys), "attention.sliding_window_pattern"
    pattern = keys.raw(key) if keys.has(key) else every
    if isinstance(pattern, list):
        windows = [bool(each) for each in per_layer(keys, key, layers)]
    else:
        every = Section({key: pattern}, keys.where).integer(key, minimum=1)
        windows = [layer % every != (0 if first else every - 1) for layer in range(layers)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _olmo2(keys: Section, stored: Stored) -> Config:
    """OLMo 3 has windows. A scaling of the rotation is that of the layers without."""
    if not keys.has("attention.sliding_window"):
        return _twin(keys, stored, "olmo2")
    found = _twin(keys, stored, "olmo3")
    theta = found.pop("rope_theta")
    local = keys.number("rope.freq_base_swa", 0.0) or theta
    full = {"rope_type": "default", **scaling_of(found), "rope_theta": theta}
    return {
        **found,
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "layer_types": window_kinds(keys, 4),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}},
    }


def scaling_of(found: Config) -> Config:
    """rope_scaling, taken out of what `rope` has found."""
    scaling = found.pop("rope_scaling", {})
    assert isinstance(scaling, dict), "rope writes it"
    return scaling


def _exaone4(keys: Section, stored: Stored) -> Config:
    found = _twin(keys, stored, "exaone4")
    window = keys.integer("attention.sliding_window", 0)
    kinds = window_kinds(keys, 4) if window else ["full_attention"] * layer_count(keys)
    return {**found, "sliding_window": window or None, "layer_types": kinds}


def _smollm3(keys: Section, stored: Stored) -> Config:
    """Each fourth layer does not rotate, which no setting says."""
    return {**_twin(keys, stored, "smollm3"), "no_rope_layer_interval": 4}


def _cohere(keys: Section, stored: Stored, model_type: str) -> Config:
    found = sizes(keys, stored)
    require(keys, "rope.scaling.type", "none")
    require(keys, "rope.dimension_count", found["head_dim"])
    return {
        "model_type": model_type,
        **found,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", above=0),
        "logit_scale": keys.number("logit_scale", above=0),
    }


def _cohere2(keys: Section, stored: Stored) -> Config:
    found = _cohere(keys, stored, "cohere2")
    window = keys.integer("attention.sliding_window", minimum=1)
    return {**found, "sliding_window": window, "layer_types": window_kinds(keys, 4)}


def _granite(keys: Section, stored: Stored) -> Config:
    return {"model_type": "granite", **rms_model(keys, stored), **granite_factors(keys)}


def granite_factors(keys: Section) -> Config:
    """The factors that Granite has."""
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0, above=0),
        "attention_multiplier": keys.number("attention.scale", above=0),
        "residual_multiplier": keys.number("residual_scale", 1.0, above=0),
        "logits_scaling": keys.number("logit_scale", 1.0, above=0),
    }


def _ministral3(keys: Section, stored: Stored) -> Config:
    """Mistral Small 3 and Ministral 3, whose queries grow with the position."""
    if not keys.has("attention.temperature_scale"):
        return _twin(keys, stored, "llama")
    found = {"model_type": "ministral3", **rms_model(keys, stored, mscale=1.0)}
    one_of_all(keys)
    theta, scaling = found.pop("rope_theta"), scaling_of(found)
    growth = keys.number("attention.temperature_scale", above=0)
    scaling |= {"llama_4_scaling_beta": growth, "rope_theta": theta}
    return {**found, "sliding_window": None, "rope_parameters": scaling}


def _starcoder2(keys: Section, stored: Stored) -> Config:
    found = sizes(keys, stored)
    require(keys, "rope.dimension_count", found["head_dim"])
    return {
        "model_type": "starcoder2",
        **{key: value for key, value in found.items() if key != "head_dim"},
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "use_bias": "blk.0.attn_q.bias" in stored,
    }


def _gpt2(keys: Section, stored: Stored, model_type: str = "gpt2") -> Config:
    found = sizes(keys, stored)
    heads = found["num_attention_heads"]
    if model_type == "gpt2":
        require(keys, "attention.head_count_kv", heads)
    else:
        require(keys, "attention.head_count_kv", 1)
    return {
        "model_type": model_type,
        "n_embd": found["hidden_size"],
        "n_head": heads,
        "n_layer": found["num_hidden_layers"],
        "n_inner": found["intermediate_size"],
        "n_positions": found["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "tie_word_embeddings": found["tie_word_embeddings"],
    }


def _bloom(keys: Section, stored: Stored) -> Config:
    found = sizes(keys, stored)
    require(keys, "attention.head_count_kv", found["num_attention_heads"])
    require(keys, "feed_forward_length", 4 * int(str(found["hidden_size"])))
    return {
        "model_type": "bloom",
        "hidden_size": found["hidden_size"],
        "n_head": found["num_attention_heads"],
        "n_layer": found["num_hidden_layers"],
        "seq_length": found["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "tie_word_embeddings": found["tie_word_embeddings"],
    }


def _gpt_neox(keys: Section, stored: Stored) -> Config:
    found = sizes(keys, stored)
    head_dim = int(str(found["head_dim"]))
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "tie_word_embeddings")
    return {
        "model_type": "gpt_neox",
        **{key: found[key] for key in shared},
        "max_position_embeddings": found["max_position_embeddings"],
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0),
        "rotary_pct": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", above=0),
        "use_parallel_residual": keys.boolean("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in stored,
    }


def _stablelm(keys: Section, stored: Stored) -> Config:
    found = sizes(keys, stored)
    head_dim = int(str(found.pop("head_dim")))
    return {
        "model_type": "stablelm",
        **found,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", above=0),
        "use_parallel_residual": keys.boolean("use_parallel_residual", False),
        "use_qkv_bias": "blk.0.attn_q.bias" in stored,
    }


def _phi2(keys: Section, stored: Stored) -> Config:
    """feed_forward_length is not to be trusted: llama.cpp's converter writes four times the width."""
    found = sizes(keys, stored)
    head_dim = int(str(found.pop("head_dim")))
    up = stored.get("blk.0.ffn_up.weight")
    return {
        "model_type": "phi",
        **found,
        "intermediate_size": found["intermediate_size"] if up is None else up.shape[0],
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", above=0),
    }


def biases(model: ModelConfig, stored: Stored) -> ModelConfig:
    """Those that the files have, which no setting says."""
    return dataclasses.replace(
        model,
        qkv_bias=has(stored, "attn_q.bias"),
        attention_out_bias=has(stored, "attn_output.bias"),
        mlp_bias=has(stored, "ffn_up.bias"),
    )


def plain_norms(model: ModelConfig, stored: Stored) -> ModelConfig:
    """llama.cpp's converter has added what norms add to their factors."""
    return dataclasses.replace(model, norm_offset=0.0)


def _out_in(model: ModelConfig, stored: Stored) -> ModelConfig:
    return dataclasses.replace(model, linear_in_out=False, qkv_bias=has(stored, "attn_qkv.bias"))


def twin(model_type: str, *, paired: bool = False) -> Architecture:
    """A llama under another name."""
    return Architecture(config=lambda keys, stored: _twin(keys, stored, model_type), paired=paired, adapt=biases)


_POST_ATTENTION = {"mlp_norm": "post_attention_norm"}

DENSE: dict[str, Architecture] = {
    "llama": Architecture(config=llama, paired=True, adapt=biases),
    "mistral3": Architecture(config=_ministral3, paired=True, adapt=biases),
    "smollm3": Architecture(config=_smollm3, paired=True, adapt=biases),
    "granite": Architecture(config=_granite, paired=True, adapt=biases),
    "qwen2": twin("qwen2"),
    "qwen3": twin("qwen3"),
    "seed_oss": dataclasses.replace(twin("seed_oss"), names=_POST_ATTENTION),
    "ernie4_5": twin("ernie4_5"),
    "gemma": Architecture(config=lambda keys, stored: _twin(keys, stored, "gemma"), adapt=plain_norms),
    "gemma2": Architecture(config=_gemma2, adapt=plain_norms),
    "gemma3": Architecture(config=_gemma3, adapt=plain_norms),
    "phi3": Architecture(config=_phi3),
    "glm4": dataclasses.replace(twin("glm4"), adapt=lambda model, stored: model),
    "olmo2": Architecture(config=_olmo2, adapt=biases),
    "exaone4": Architecture(config=_exaone4, adapt=biases),
    "command-r": Architecture(config=lambda keys, stored: _cohere(keys, stored, "cohere"), adapt=biases),
    "cohere2": Architecture(config=_cohere2, adapt=biases),
    "stablelm": Architecture(config=_stablelm),
    "phi2": Architecture(config=_phi2),
    "starcoder2": Architecture(config=_starcoder2),
    "starcoder": Architecture(config=lambda keys, stored: _gpt2(keys, stored, "gpt_bigcode"), adapt=_out_in),
    "gpt2": Architecture(config=_gpt2, adapt=_out_in),
    "gptneox": Architecture(config=_gpt_neox),
    "bloom": Architecture(config=_bloom),
}
