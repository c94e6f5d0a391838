"""GPT-NeoX and Pythia: layer norms, parallel branches, part of each head rotates, q, k, v stored head by head."""

from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.hf_rope import read_rope
from ingot.convert.weights import Drop, Regroup, Row, Take


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GPTNeoXForCausalLM; defaults are those of transformers."""
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    max_positions = section.integer("max_position_embeddings", 2048, minimum=1)
    bias = section.boolean("attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size", minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_eps", 1e-5, above=0),
        activation=read_activation(section, "hidden_act", "gelu"),
        gated_mlp=False,
        rope=read_rope(
            section, head_dim, max_positions, theta_key="rotary_emb_base", partial_key="rotary_pct", partial=0.25
        ),
        parallel_branches=section.boolean("use_parallel_residual", True),
        attention_scale=head_dim**-0.5,
        fused_qkv=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        tied_embeddings=section.boolean("tie_word_embeddings", False),
    )


_LAYER = "gpt_neox.layers.{i}"

FAMILY = Family(
    name="gpt_neox",
    models="GPT-NeoX 20B, Pythia",
    read=read,
    rows=takes(
        {
            "embed/weight": "gpt_neox.embed_in.weight",
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.input_layernorm",
                    "layers.{i}/attn/out": f"{_LAYER}.attention.dense",
                    "layers.{i}/mlp_norm": f"{_LAYER}.post_attention_layernorm",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.dense_h_to_4h",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.dense_4h_to_h",
                    "norm": "gpt_neox.final_layer_norm",
                }
            ),
            "lm_head/weight": "embed_out.weight",
        }
    )
    + tuple(
        Row(f"layers.{{i}}/attn/qkv/{x}", Regroup(Take(f"{_LAYER}.attention.query_key_value.{x}"), parts=3))
        for x in ("weight", "bias")
    ),
    other_names={"embed_out.weight": "lm_head.weight"},  # as transformers 5 calls it in memory
    drops=tuple(Drop(f"{_LAYER}.attention.{x}") for x in ("bias", "masked_bias", "rotary_emb.inv_freq")),  # old files
    tiny={
        "model_type": "gpt_neox",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
