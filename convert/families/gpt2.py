"""GPT-2: layer norms, learned positions, one qkv matrix, weights stored [in, out], GELU."""

from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.weights import Drop


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GPT2LMHeadModel; defaults are those of transformers.

    Whether qkv has a bias only the files tell: models trained without it leave it away, which is the same as zeros.
    reorder_and_upcast_attn asks for float32 scores, which they always are here.
    """
    hidden = section.integer("n_embd", minimum=1)
    heads = section.integer("n_head", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="n_embd", heads_key="n_head")
    section.boolean("reorder_and_upcast_attn", False)
    return ModelConfig(
        family="gpt2",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("n_inner", 4 * hidden, minimum=1),
        num_layers=section.integer("n_layer", minimum=1),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=section.integer("n_positions", 1024, minimum=1),
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_epsilon", 1e-5, above=0),
        activation=read_activation(section, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        attention_scale=head_dim**-0.5 if section.boolean("scale_attn_weights", True) else 1.0,
        scale_by_inverse_layer=section.boolean("scale_attn_by_inverse_layer_idx", False),
        fused_qkv=True,
        qkv_bias=names is None or any(name.endswith(".attn.c_attn.bias") for name in names),
        attention_out_bias=True,
        mlp_bias=True,
        linear_in_out=True,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


_LAYER = "transformer.h.{i}"

FAMILY = Family(
    name="gpt2",
    models="GPT-2, DistilGPT-2",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.wte.weight",
            "positions/weight": "transformer.wpe.weight",
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.ln_1",
                    "layers.{i}/attn/qkv": f"{_LAYER}.attn.c_attn",
                    "layers.{i}/attn/out": f"{_LAYER}.attn.c_proj",
                    "layers.{i}/mlp_norm": f"{_LAYER}.ln_2",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.c_fc",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.c_proj",
                    "norm": "transformer.ln_f",
                }
            ),
            "lm_head/weight": "lm_head.weight",
        }
    ),
    drops=(Drop(f"{_LAYER}.attn.bias"), Drop(f"{_LAYER}.attn.masked_bias")),  # old files keep their causal masks
    optional_prefix="transformer.",  # the first GPT-2 files were saved without it
    nullable=("n_inner",),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    tiny={
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
