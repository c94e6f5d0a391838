"""OPT: layer norms, ReLU, learned positions whose first two rows mean nothing.

OPT 350M norms the residual sums instead of what branches read, has no last norm, and a token table that is narrower
than the model.
"""

from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.weights import Row, Skip, Take
from ingot.errors import UnsupportedModelError

_FIRST_ROW = 2


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an OPTForCausalLM; defaults are those of transformers."""
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    if not section.boolean("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError(
            "layer_norm_elementwise_affine has a value that is not supported",
            where=section.place("layer_norm_elementwise_affine"),
            expected="true",
            got="false",
        )
    before = section.boolean("do_layer_norm_before", True)
    key = "word_embed_proj_dim"
    width = hidden if section.is_null(key) else section.integer(key, hidden, minimum=1)
    bias = section.boolean("enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("ffn_dim", 3072, minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=section.integer("max_position_embeddings", 2048, minimum=1),
        norm=Norm.LAYER,
        norm_eps=1e-5,
        activation=read_activation(section, "activation_function", "relu"),
        gated_mlp=False,
        rope=None,
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        embedding_size=0 if width == hidden else width,
        pre_norms=before,
        sum_norms=not before,
        last_norm=before and not section.boolean("_remove_final_layer_norm", False),
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


_MODEL = "model.decoder"
_LAYER = f"{_MODEL}.layers.{{i}}"

FAMILY = Family(
    name="opt",
    models="OPT 125M to 66B",
    read=read,
    rows=(
        *takes(
            {
                "embed/weight": f"{_MODEL}.embed_tokens.weight",
                "embed/out/weight": f"{_MODEL}.project_in.weight",
                "lm_head/in/weight": f"{_MODEL}.project_out.weight",
                **weights_and_biases(
                    {
                        "layers.{i}/attn_norm": f"{_LAYER}.self_attn_layer_norm",
                        **{f"layers.{{i}}/attn/{name}": f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"},
                        "layers.{i}/attn/out": f"{_LAYER}.self_attn.out_proj",
                        "layers.{i}/mlp_norm": f"{_LAYER}.final_layer_norm",
                        "layers.{i}/mlp/up": f"{_LAYER}.fc1",
                        "layers.{i}/mlp/down": f"{_LAYER}.fc2",
                        "norm": f"{_MODEL}.final_layer_norm",
                    }
                ),
                "lm_head/weight": "lm_head.weight",
            }
        ),
        Row("positions/weight", Skip(Take(f"{_MODEL}.embed_positions.weight"), _FIRST_ROW)),
    ),
    optional_prefix="model.",
    nullable=("word_embed_proj_dim",),
    tiny={
        "model_type": "opt",
        "vocab_size": 61,
        "hidden_size": 48,
        "ffn_dim": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
)
