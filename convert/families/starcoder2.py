"""StarCoder 2: layer norms, rotary positions, grouped keys, biases, a plain MLP with GELU."""

from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim, read_kv_heads, read_window
from ingot.convert.hf_rope import read_rope


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Starcoder2ForCausalLM; defaults are those of transformers."""
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    layers = section.integer("num_hidden_layers", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    max_positions = section.integer("max_position_embeddings", 4096, minimum=1)
    bias, window = section.boolean("use_bias", True), read_window(section)
    return ModelConfig(
        family="starcoder2",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size", minimum=1),
        num_layers=layers,
        heads=heads,
        kv_heads=read_kv_heads(section, heads, 2),
        head_dim=head_dim,
        max_positions=max_positions,
        norm=Norm.LAYER,
        norm_eps=section.number("norm_epsilon", 1e-5, above=0),
        activation=read_activation(section, "hidden_act", "gelu_pytorch_tanh"),
        gated_mlp=False,
        rope=read_rope(section, head_dim, max_positions),
        windows=(window,) * layers if window else (),
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


_LAYER = "model.layers.{i}"

FAMILY = Family(
    name="starcoder2",
    models="StarCoder2 3B, 7B and 15B",
    read=read,
    rows=takes(
        {
            "embed/weight": "model.embed_tokens.weight",
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.input_layernorm",
                    "layers.{i}/attn/q": f"{_LAYER}.self_attn.q_proj",
                    "layers.{i}/attn/k": f"{_LAYER}.self_attn.k_proj",
                    "layers.{i}/attn/v": f"{_LAYER}.self_attn.v_proj",
                    "layers.{i}/attn/out": f"{_LAYER}.self_attn.o_proj",
                    "layers.{i}/mlp_norm": f"{_LAYER}.post_attention_layernorm",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.c_fc",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.c_proj",
                    "norm": "model.norm",
                }
            ),
            "lm_head/weight": "lm_head.weight",
        }
    ),
    nullable=("sliding_window",),
    tiny={
        "model_type": "starcoder2",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "sliding_window": 20,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
