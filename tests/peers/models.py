"""Random-weight Hugging Face directories of real models' exact shapes: speed does not depend on the weights' values.

python -m tests.peers.models NAME DIRECTORY
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 256, 257
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "tinyllama": {
        **_LLAMA,
        "vocab_size": 32000,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama3.2-1b": {
        **_LLAMA,
        "vocab_size": 128256,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "num_attention_heads": 14,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as in the real checkpoints."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{place}.self_attn.{name}_proj.weight", (rows, hidden)
            if shape["model_type"] == "qwen2":
                yield f"{place}.self_attn.{name}_proj.bias", (rows,)
        yield f"{place}.self_attn.o_proj.weight", (hidden, q)
        yield f"{place}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{place}.mlp.up_proj.weight", (inner, hidden)
        yield f"{place}.mlp.down_proj.weight", (hidden, inner)
        yield f"{place}.input_layernorm.weight", (hidden,)
        yield f"{place}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)


def write_model(shape: dict[str, Any], directory: Path) -> None:
    """config.json, model.safetensors in bf16, and a tokenizer of bytes and made-up words."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**shape, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_weights(shape, directory / "model.safetensors")
    write_tokenizer(shape["vocab_size"], directory)


def write_weights(shape: dict[str, Any], path: Path) -> None:
    """Normal values of deviation 0.02; norms are ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors(shape):
        begin, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors(shape):
            norm = "norm" in name
            values = np.ones(size, np.float32) if norm else 0.02 * random.standard_normal(size, dtype=np.float32)
            file.write(to_bf16(values).tobytes())


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Bytes are tokens 0 to 255, `<x300>` is token 300; one merge, since some loaders refuse a tokenizer without."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<x{index}>" for index in range(256, vocab_size))]
    names[300] = "th"
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([names[BOS], names[EOS]])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[BOS],
        "eos_token": names[EOS],
        "pad_token": names[EOS],
        "unk_token": names[EOS],  # without, transformers adds one beyond the vocabulary
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    write_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
