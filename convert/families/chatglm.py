"""ChatGLM 2 and 3 and GLM-4 9B as their makers store them: a GLM under other names, its queries, keys and values in
one matrix."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import require_values
from ingot.convert.hf_rope import interleaved, read_frequencies
from ingot.convert.weights import Drop
from ingot.errors import ConfigError, UnsupportedModelError

_NAMES = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "num_key_value_heads": "multi_query_group_num",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "vocab_size": "padded_vocab_size",
}
# What is so in every model.
_USUAL = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
}
# How their code computes, not what.
_WITHOUT_EFFECT = (
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "fp32_residual_connection"),
    *("original_rope", "classifier_dropout"),
)
_OF_THE_FIRST = ("inner_hidden_size", "position_encoding_2d")
_OF_THE_SECOND = 65024  # padded_vocab_size of ChatGLM 2 and 3


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a ChatGLMForConditionalGeneration; defaults are those of its own code, transformers has none."""
    if strange := [key for key in _OF_THE_FIRST if section.has(key)]:
        raise UnsupportedModelError(
            "the first ChatGLM is not supported: ingot lacks positions in two dimensions, and prompts whose tokens all "
            "see each other",
            where=section.place(strange[0]),
            expected="ChatGLM 2, ChatGLM 3 or GLM-4",
        )
    require_values(section, _USUAL)
    if not section.boolean("multi_query_attention", False):
        raise UnsupportedModelError(
            "multi_query_attention false is not supported",
            where=section.place("multi_query_attention"),
            expected="true",
            got="false",
        )
    for key in _WITHOUT_EFFECT:
        section.has(key)
    named = section.called(_NAMES)
    if named.raw("vocab_size") is None:
        raise ConfigError("padded_vocab_size is missing", where=section.place("padded_vocab_size"))
    section.has("vocab_size")  # of the tokenizer
    model = llama.read_llama(
        named,
        positions=2048,
        kv_heads=1,
        head_dim=128,
        eps=1e-5,
        activation_key=None,
        has_attention_bias=False,
        one_rope=False,
    )
    theta, rotary_dim = 1e4 * _rope_ratio(section), model.head_dim // 2
    rope = read_frequencies(Section({}, section.where), section, theta, rotary_dim, model.max_positions, flags=section)
    return dataclasses.replace(
        model,
        rope=interleaved(rope),
        fused_qkv=True,
        qkv_bias=section.boolean("add_qkv_bias", False),
        fused_gate_up=True,
    )


def _rope_ratio(section: Section) -> float:
    """What theta is multiplied with. ChatGLM 2 and 3 with longer contexts say no more, though the code in their files
    computes two different things with the number."""
    ratio = section.number("rope_ratio", 1.0, above=0)
    if ratio != 1 and section.raw("padded_vocab_size") == _OF_THE_SECOND:
        raise UnsupportedModelError(
            "rope_ratio of a ChatGLM 2 or 3 is not supported: their files use it in two different ways",
            where=section.place("rope_ratio"),
            expected="1",
            got=f"{ratio:g}",
            hint="convert the ChatGLM without a longer context, or a GLM-4",
        )
    return ratio


_LAYER = "transformer.encoder.layers.{i}"

FAMILY = Family(
    name="chatglm",
    models="ChatGLM 2 and 3 6B, GLM-4 9B",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.embedding.word_embeddings.weight",
            "layers.{i}/attn_norm/weight": f"{_LAYER}.input_layernorm.weight",
            **weights_and_biases({"layers.{i}/attn/qkv": f"{_LAYER}.self_attention.query_key_value"}),
            "layers.{i}/attn/out/weight": f"{_LAYER}.self_attention.dense.weight",
            "layers.{i}/mlp_norm/weight": f"{_LAYER}.post_attention_layernorm.weight",
            "layers.{i}/mlp/gate_up/weight": f"{_LAYER}.mlp.dense_h_to_4h.weight",
            "layers.{i}/mlp/down/weight": f"{_LAYER}.mlp.dense_4h_to_h.weight",
            "norm/weight": "transformer.encoder.final_layernorm.weight",
            "lm_head/weight": "transformer.output_layer.weight",
        }
    ),
    drops=(Drop("transformer.rotary_pos_emb.inv_freq"),),
    tiny={
        "model_type": "chatglm",
        "padded_vocab_size": 61,
        "hidden_size": 48,
        "ffn_hidden_size": 84,
        "num_layers": 2,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 16,
        "seq_length": 64,
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": True,
        "rope_ratio": 50,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
