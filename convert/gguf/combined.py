"""Architectures of llama.cpp whose layers combine parts of others: Falcon H1, Kimi Linear, Gemma 3n, MiniCPM 3, and
those with the latent attention of DeepSeek 2 and something more."""

import functools
import math

from ingot.configs.mixers import LinearAttentionConfig
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture, Config, Stored
from ingot.convert.gguf.dense import biases, window_kinds
from ingot.convert.gguf.mixtures import latent_model, latent_rows, routed
from ingot.convert.gguf.settings import (
    SIGMOID,
    SOFTMAX,
    expert_size,
    has,
    layer_count,
    leading_dense,
    per_layer,
    require,
    rms_model,
    taken_experts,
    whole,
)
from ingot.convert.weights import Concat, Expr, LogOfMinus, OneOf, Shaped, Take
from ingot.errors import UnsupportedModelError


def _falcon_h1(keys: Section, stored: Stored) -> Config:
    """llama.cpp's converter has multiplied all factors into the weights."""
    if "output.weight" not in stored:
        raise UnsupportedModelError(
            "the GGUF file has no output.weight: a factor of its logits is lost",
            where=keys.where,
            expected="a tensor output.weight, which has the factor in it",
            hint="convert the model that the file was made from",
        )
    heads, inner = keys.integer("ssm.time_step_rank", minimum=1), keys.integer("ssm.inner_size", minimum=1)
    return {
        "model_type": "falcon_h1",
        **rms_model(keys, stored),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.integer("ssm.group_count", minimum=1),
        "mamba_d_state": keys.integer("ssm.state_size", minimum=1),
        "mamba_d_conv": keys.integer("ssm.conv_kernel", minimum=2),
        "mamba_conv_bias": has(stored, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(stored, "ssm_in.bias"),
        "projectors_bias": has(stored, "ssm_out.bias"),
        "mamba_rms_norm": has(stored, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _falcon_h1_rows(model: ModelConfig) -> dict[str, Expr]:
    """This one norm has no ending in llama.cpp."""
    name = "blk.{i}.ffn_norm"
    return {"layers.{i}/mlp_norm/weight": OneOf((Take(name), Take(f"{name}.weight")))}


def _kimi_linear(keys: Section, stored: Stored) -> Config:
    """Layers without key heads have the delta rule, with as many heads as attention."""
    layers = layer_count(keys)
    attends = [bool(count) for count in per_layer(keys, "attention.head_count_kv", layers)]
    require(keys, "expert_gating_func", SIGMOID)
    norm = keys.boolean("expert_weights_norm", True)
    found = {**latent_model(keys, stored), **routed(keys)}
    found.pop("rope_parameters")
    return {
        **{key: value for key, value in found.items() if key not in ("norm_topk_prob", "n_group")},
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "linear_num_heads": whole(keys, "attention.head_count"),
        "linear_head_dim": keys.integer("kda.head_dim", minimum=1),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", minimum=2),
        **taken_experts(keys),
        "moe_renormalize": norm,
        "num_expert_group": found.get("n_group", 1),
        "topk_group": found.get("topk_group", 1),
        "moe_intermediate_size": expert_size(keys, stored),
        "num_shared_experts": keys.integer("expert_shared_count", minimum=1),
        "first_k_dense_replace": leading_dense(keys, stored, layers),
    }


def _kimi_rows(model: ModelConfig) -> dict[str, Expr]:
    mixer = model.mixer
    assert isinstance(mixer, LinearAttentionConfig), "the family has it"
    channels = mixer.heads * mixer.key_dim
    convs = tuple(Take(f"blk.{{i}}.ssm_conv1d_{each}.weight") for each in "qkv")
    named = {"z_low": "ssm_g_a", "z": "ssm_g_b", "b": "ssm_beta", "dt_low": "ssm_f_a", "dt": "ssm_f_b"}
    rows: dict[str, Expr] = {f"{ours}/weight": Take(f"blk.{{i}}.{theirs}.weight") for ours, theirs in named.items()}
    rows |= {
        "qkv/weight": Concat(tuple(Take(f"blk.{{i}}.attn_{each}.weight") for each in "qkv")),
        "conv/weight": Concat(tuple(Shaped(conv, (channels, 1, mixer.conv_width)) for conv in convs)),
        "a_log/weight": LogOfMinus(Shaped(Take("blk.{i}.ssm_a"), (1, 1, mixer.heads, 1))),
        "out/weight": Take("blk.{i}.attn_output.weight"),
    }
    return latent_rows(model) | {f"layers.{{i}}/linear/{name}": expr for name, expr in rows.items()}


def _minicpm3(keys: Section, stored: Stored) -> Config:
    """llama.cpp has the factors of the one model that there is. A head of values is as wide as one of the model."""
    heads, hidden = whole(keys, "attention.head_count"), keys.integer("embedding_length", minimum=1)
    found = latent_model(keys, stored, value_dim=hidden // max(heads, 1))
    return {**found, "model_type": "minicpm3", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _latent_mixture(keys: Section, stored: Stored, model_type: str) -> Config:
    """Latent attention, and experts beside shared ones behind first layers without."""
    return {
        **latent_model(keys, stored),
        "model_type": model_type,
        **taken_experts(keys, "n_routed_experts"),
        **routed(keys),
        "moe_intermediate_size": expert_size(keys, stored),
        "n_shared_experts": keys.integer("expert_shared_count", minimum=1),
    }


def _sparse(keys: Section, stored: Stored, model_type: str) -> Config:
    """What chooses the tokens of its sparse attention is left out."""
    require(keys, "expert_gating_func", SIGMOID)
    for key in ("head_count", "key_length", "types"):
        keys.has(f"attention.indexer.{key}")
    layers = layer_count(keys)
    first = leading_dense(keys, stored, layers)
    return {
        **_latent_mixture(keys, stored, model_type),
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "index_topk": keys.integer("attention.indexer.top_k", minimum=1),
    }


def _mistral4(keys: Section, stored: Stored) -> Config:
    """Queries grow only where the file says how much, as in llama.cpp."""
    require(keys, "expert_gating_func", SOFTMAX)
    found = _latent_mixture(keys, stored, "mistral4")
    rotation = found["rope_parameters"]
    assert isinstance(rotation, dict), "latent_model writes it"
    original = rotation.get("original_max_position_embeddings", found["max_position_embeddings"])
    require(keys, "attention.temperature_length", original)
    growth = keys.number("attention.temperature_scale", 0.0)
    return {
        **found,
        "first_k_dense_replace": leading_dense(keys, stored, layer_count(keys)),
        "rope_parameters": {**rotation, "original_max_position_embeddings": original, "llama_4_scaling_beta": growth},
    }


def _gemma3n(keys: Section, stored: Stored) -> Config:
    """Each fifth layer sees all tokens. The share of gates that are cut off is stored as their distance from the mean
    in standard deviations."""
    layers = layer_count(keys)
    table = stored.get("per_layer_token_embd.weight")
    narrow = stored.get("blk.0.laurel_l.weight")
    found = {"model_type": "gemma3n_text", **rms_model(keys, stored)}
    distances = per_layer(keys, "activation_sparsity_scale", layers)
    return {
        **found,
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "layer_types": window_kinds(keys, 5),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", minimum=1),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "altup_num_inputs": keys.integer("altup.num_inputs", 4, minimum=2),
        "altup_active_idx": keys.integer("altup.active_idx", 0),
        **({} if narrow is None else {"laurel_rank": narrow.shape[0]}),
        "activation_sparsity_pattern": [_share(keys, distance) for distance in distances],
    }


def _share(keys: Section, distance: object) -> float:
    """The share of normally distributed numbers below this distance: 0.95 for 1.645."""
    key = "activation_sparsity_scale"
    given = Section({key: distance}, keys.where).raw(key)
    if not isinstance(given, int | float) or not given < 8:
        raise UnsupportedModelError(
            f"{key} has a value that is not supported",
            where=keys.place(key),
            expected="numbers below 8, or minus infinity",
            got=repr(given)[:100],
        )
    return round((1 + math.erf(given / math.sqrt(2))) / 2, 7)


_STREAMS = {
    "layers.{i}/streams/router/weight": Take("blk.{i}.altup_router.weight"),
    "layers.{i}/streams/router_norm/weight": Take("blk.{i}.altup_router_norm.weight"),
    "layers.{i}/streams/predict/weight": Take("blk.{i}.altup_predict_coef.weight"),
    "layers.{i}/streams/correct/weight": Take("blk.{i}.altup_correct_coef.weight"),
    "layers.{i}/input/scale/weight": Take("blk.{i}.altup_correct_scale.weight"),
    "layers.{i}/narrow/in/weight": Take("blk.{i}.laurel_l.weight"),
    "layers.{i}/narrow/out/weight": Take("blk.{i}.laurel_r.weight"),
    "layers.{i}/narrow/norm/weight": Take("blk.{i}.laurel_post_norm.weight"),
}


def _stream_rows(model: ModelConfig) -> dict[str, Expr]:
    """Products into and out of the other streams lie in a stack each."""
    assert model.streams is not None, "the family has them"
    between: dict[str, Expr] = {
        f"streams/{ours}/{stream}/weight": Take(f"{theirs}.{stream - 1}.weight")
        for ours, theirs in (("in", "altup_proj"), ("out", "altup_unembd_proj"))
        for stream in range(1, model.streams.count)
    }
    return {**_STREAMS, **between}


COMBINED: dict[str, Architecture] = {
    "falcon-h1": Architecture(config=_falcon_h1, rows=_falcon_h1_rows, adapt=biases),
    "kimi-linear": Architecture(config=_kimi_linear, rows=_kimi_rows),
    "minicpm3": Architecture(config=_minicpm3, rows=latent_rows),
    "gemma3n": Architecture(config=_gemma3n, rows=_stream_rows),
    "mistral4": Architecture(config=_mistral4, rows=latent_rows),
    **{
        name: Architecture(config=functools.partial(_sparse, model_type=kind), rows=latent_rows, choosers=".indexer.")
        for name, kind in (("deepseek32", "deepseek_v32"), ("glm-dsa", "glm_moe_dsa"))
    },
}
