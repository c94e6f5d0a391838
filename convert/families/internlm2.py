"""InternLM 2, 2.5 and 3 in its second generation's form: a Llama whose queries, keys and values lie by key head."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes, weights_and_biases
from ingot.convert.weights import Drop, KeyGroups, Row, Take


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an InternLM2ForCausalLM; defaults are those of its own code, transformers has none."""
    model = llama.read_llama(section, has_attention_bias=False, intermediate=11008)
    bias = section.boolean("bias", True)
    section.has("attn_implementation")
    return dataclasses.replace(model, qkv_bias=bias, attention_out_bias=bias)


_LAYER = "model.layers.{i}"
_NAMES = {
    "attn/out": "attention.wo",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="internlm2",
    models="InternLM 2 and 2.5",
    read=read,
    rows=(
        *takes(
            {
                "embed/weight": "model.tok_embeddings.weight",
                **weights_and_biases({f"layers.{{i}}/{ours}": f"{_LAYER}.{name}" for ours, name in _NAMES.items()}),
                "norm/weight": "model.norm.weight",
                "lm_head/weight": "output.weight",
            }
        ),
        *(
            Row(
                f"layers.{{i}}/attn/{name}/{kind}",
                KeyGroups(Take(f"{_LAYER}.attention.wqkv.{kind}"), ("queries", "kv_head", "kv_head"), (part,)),
            )
            for part, name in enumerate("qkv")
            for kind in ("weight", "bias")
        ),
    ),
    drops=(Drop(f"{_LAYER}.attention.rotary_emb.inv_freq"),),
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "internlm2",
        "bias": True,
    },
)
