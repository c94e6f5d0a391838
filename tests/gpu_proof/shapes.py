"""Models by their shapes, as config.json has them; and how they should run on a GPU of sm_90."""

import dataclasses
from collections.abc import Mapping

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "attention_bias": False,
    "mlp_bias": False,
}

SHAPES: Mapping[str, Mapping[str, object]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Fractions of what the same run measures of the machine; ratio: to transformers, compiled, with a static cache."""

    decode_of_bandwidth: float = 0.75
    prefill_of_products: float = 0.60
    attention_of_bandwidth: float = 0.80
    ratio: float = 1.3
