"""MPT: scores that fall with the distance, layer norms without bias, one qkv matrix, no biases."""

import json
from collections.abc import Collection

from ingot.configs.model import AlibiConfig, ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.alibi import slopes_of
from ingot.convert.family import Family, takes
from ingot.convert.hf_config import read_head_dim
from ingot.errors import UnsupportedModelError

# What transformers does not compute, though files could ask for it.
_USUAL: dict[str, object] = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "clip_qkv": None,
    "alibi": True,
    "alibi_bias_max": 8,  # transformers computes with 8 whatever stands there
}
_USUAL_OF_MODEL: dict[str, object] = {"logit_scale": None, "no_bias": True, "expansion_ratio": 4}
_HARMLESS: dict[str, object] = {"attn_impl": "torch", "attn_pdrop": 0, "attn_uses_sequence_id": False}
_HARMLESS_OF_MODEL: dict[str, object] = {
    "emb_pdrop": 0.0,
    "embedding_fraction": 1.0,  # of gradients
    "init_device": "cpu",
    "learned_pos_emb": True,  # in place of ALiBi only
    "norm_type": "low_precision_layernorm",  # how exactly one is computed
}
_UNKNOWN = ("init_config", "tokenizer_name", "verbose")  # to transformers


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an MptForCausalLM; defaults are those of transformers."""
    hidden, heads = section.integer("d_model", minimum=1), section.integer("n_heads", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="d_model", heads_key="n_heads")
    attention = section.section("attn_config")
    for key in _UNKNOWN:
        section.has(key)
    for of, usual, harmless in ((section, _USUAL_OF_MODEL, _HARMLESS_OF_MODEL), (attention, _USUAL, _HARMLESS)):
        for key, value in harmless.items():
            _read(of, key, value)
        for key, value in usual.items():
            _refuse_unless(of, key, value)
    scale = attention.number("softmax_scale", head_dim**-0.5, above=0) if attention.has("softmax_scale") else 0.0
    return ModelConfig(
        family="mpt",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=section.integer("n_layers", minimum=1),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=section.integer("max_seq_len", 2048, minimum=1),
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_epsilon", 1e-5, above=0),
        norm_bias=False,
        activation="gelu",
        gated_mlp=False,
        rope=None,
        alibi=AlibiConfig(slopes=slopes_of(heads)),
        attention_scale=scale or head_dim**-0.5,
        fused_qkv=True,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def _read(section: Section, key: str, usual: object) -> object:
    """A value of the type of the usual one"""
    if isinstance(usual, bool):
        return section.boolean(key, usual)
    if isinstance(usual, int | float):
        return section.number(key, usual)
    return section.text(key, usual) if isinstance(usual, str) else section.raw(key)


def _refuse_unless(section: Section, key: str, usual: object) -> None:
    if _read(section, key, usual) != usual:
        raise UnsupportedModelError(
            f"{key} has a value that is not supported",
            where=section.place(key),
            expected=str(usual).lower() if isinstance(usual, bool) else "null" if usual is None else str(usual),
            got=json.dumps(section.raw(key))[:200],
        )


_LAYER = "transformer.blocks.{i}"

FAMILY = Family(
    name="mpt",
    models="MPT 7B and 30B without `clip_qkv`",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.wte.weight",
            "layers.{i}/attn_norm/weight": f"{_LAYER}.norm_1.weight",
            "layers.{i}/attn/qkv/weight": f"{_LAYER}.attn.Wqkv.weight",
            "layers.{i}/attn/out/weight": f"{_LAYER}.attn.out_proj.weight",
            "layers.{i}/mlp_norm/weight": f"{_LAYER}.norm_2.weight",
            "layers.{i}/mlp/up/weight": f"{_LAYER}.ffn.up_proj.weight",
            "layers.{i}/mlp/down/weight": f"{_LAYER}.ffn.down_proj.weight",
            "norm/weight": "transformer.norm_f.weight",
            "lm_head/weight": "lm_head.weight",
        }
    ),
    nullable=("softmax_scale", "clip_qkv", "logit_scale"),
    aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    tiny={
        "model_type": "mpt",
        "vocab_size": 61,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 3,
        "max_seq_len": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
