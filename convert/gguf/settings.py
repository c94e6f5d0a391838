"""Settings of a GGUF file → keys of a config.json: what several architectures say alike."""

import math

from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Config, Stored
from ingot.errors import UnsupportedModelError

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def layer_count(keys: Section) -> int:
    """Without the layers behind the last one, which draft tokens."""
    return keys.integer("block_count", minimum=1) - keys.integer("nextn_predict_layers", 0)


def per_layer(keys: Section, key: str, layers: int) -> list[object]:
    """A setting of each layer, given once or layer by layer."""
    value = keys.raw(key) if keys.has(key) else None
    if not isinstance(value, list):
        return [value] * layers
    if len(value) < layers:
        raise UnsupportedModelError(
            f"{key} has not one entry for each layer", where=keys.place(key), expected=str(layers), got=str(len(value))
        )
    return value[:layers]


def whole(keys: Section, key: str, default: int | None = None, *, beside: tuple[object, ...] = ()) -> int:
    """A number that may be given layer by layer, if all layers agree. beside: what other layers may have."""
    value = keys.raw(key)
    if not isinstance(value, list):
        return keys.integer(key, default)
    found = dict.fromkeys(each for each in value if each not in beside)
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{key} differs from layer to layer, which is not supported", where=keys.place(key), got=repr(value)[:200]
        )
    return Section({key: next(iter(found))}, keys.where).integer(key)


def require(keys: Section, key: str, *values: object) -> None:
    """Raise UnsupportedModelError unless a setting is absent or one of these."""
    if keys.has(key) and keys.raw(key) not in values:
        raise UnsupportedModelError(
            f"{key} has a value that is not supported",
            where=keys.place(key),
            expected=" or ".join(map(str, values)),
            got=repr(keys.raw(key))[:200],
        )


def sizes(keys: Section, stored: Stored, *, no_kv: tuple[object, ...] = ()) -> Config:
    """What all architectures have. no_kv: what head_count_kv says of layers without attention."""
    heads = whole(keys, "attention.head_count", beside=no_kv)
    hidden = keys.integer("embedding_length", minimum=1)
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    require(keys, "attention.value_length", head_dim)
    keys.integer("vocab_size", 0)  # the token table says it
    found: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": layer_count(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(keys, "attention.head_count_kv", heads, beside=no_kv),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length", minimum=1),
        "tie_word_embeddings": "output.weight" not in stored,
    }
    if keys.has("feed_forward_length"):
        found["intermediate_size"] = whole(keys, "feed_forward_length", beside=no_kv)
    return found


def rope(keys: Section, head_dim: int, *, mscale: float = 0.0) -> Config:
    """rope_theta, rope_scaling, and the part of a head that rotates.

    mscale  times the logarithm's factor is the `mscale` of config.json; 0: the architecture has no such factor
    """
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    found: Config = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = rotary_dim / head_dim
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.integer("rope.scaling.original_context_length", 0)
    keys.has("rope.scaling.finetuned")
    require(keys, "rope.scaling.alpha", 0.0)
    if not mscale:
        require(keys, "rope.scaling.yarn_log_multiplier", 0.0)
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        require(keys, f"rope.scaling.{key}", 1.0)
    if kind in ("none", "longrope"):
        return found
    scaling: Config = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or keys.integer("context_length")
        share = keys.number("rope.scaling.attn_factor", 1.0)
        if share != 1:
            scaling["attention_factor"] = share * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
        if mscale and (share := keys.number("rope.scaling.yarn_log_multiplier", 0.0)):
            scaling |= {"mscale": round(share * mscale, 6), "mscale_all_dim": round(share * mscale, 6)}
        for side in ("fast", "slow"):
            if keys.has(f"rope.scaling.yarn_beta_{side}"):
                scaling[f"beta_{side}"] = keys.number(f"rope.scaling.yarn_beta_{side}")
    if kind != "linear" or factor != 1:
        found["rope_scaling"] = scaling
    return found


def rms_model(keys: Section, stored: Stored, *, no_kv: tuple[object, ...] = (), mscale: float = 0.0) -> Config:
    """What models with RMS norms and rotary positions share; no_kv as in `sizes`, mscale as in `rope`."""
    found = sizes(keys, stored, no_kv=no_kv)
    head_dim = found["head_dim"]
    assert isinstance(head_dim, int), "sizes reads it"
    require(keys, "attention.causal", True)
    keys.has("tensor_data_layout")
    return {
        **found,
        **rope(keys, head_dim, mscale=mscale),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", above=0),
    }


def one_of_all(keys: Section) -> None:
    """Raise UnsupportedModelError for factors and experts that most architectures do not have."""
    for key in ("expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"):
        require(keys, key, 0.0, 1.0)
    require(keys, "expert_shared_count", 0)
    require(keys, "leading_dense_block_count", 0)


def taken_experts(keys: Section, count_key: str = "num_experts") -> Config:
    """How many experts there are, and how many a token takes."""
    return {
        count_key: keys.integer("expert_count", minimum=1),
        "num_experts_per_tok": keys.integer("expert_used_count", minimum=1),
    }


def expert_size(keys: Section, stored: Stored) -> int:
    """Inner width of one expert: older files say it only by their tensors."""
    if keys.has("expert_feed_forward_length"):
        return whole(keys, "expert_feed_forward_length", beside=(0,))
    found = (each.shape[1] for name, each in stored.items() if name.endswith("ffn_up_exps.weight"))
    return next(found, 0) or keys.integer("expert_feed_forward_length", minimum=1)


def has(stored: Stored, name: str) -> bool:
    """Whether some layer has the tensor, "blk.{i}." left out."""
    return any(key.startswith("blk.") and key.partition(".")[2].partition(".")[2] == name for key in stored)


def leading_dense(keys: Section, stored: Stored, layers: int) -> int:
    """First layers without experts: not every converter writes how many."""
    keys.has("leading_dense_block_count")
    sparse = layers_with(stored, "ffn_gate_inp.weight", layers)
    return next((layer for layer, each in enumerate(sparse) if each), layers)


def layers_with(stored: Stored, name: str, layers: int) -> list[bool]:
    """Whether each layer has the tensor."""
    return [f"blk.{layer}.{name}" in stored for layer in range(layers)]
