"""Writes models with experts whose products are quantised, beside one expert that all rows share: Qwen 2 with experts.
Routers and gates are floats."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ingot.dtypes import DType
from tests import quantised as write


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """inner: of each expert; shared: of the one that all rows share; experts, slots: how many there are, and how many
    a row takes."""

    hidden: int
    inner: int
    shared: int
    experts: int
    slots: int
    layers: int = 2
    heads: int = write.HEADS
    kv_heads: int = write.KV_HEADS
    head_dim: int = write.HEAD_DIM
    vocab: int = write.VOCAB
    positions: int = 64

    @property
    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            **write.CONFIG,
            **{"model_type": "qwen2_moe", "hidden_size": self.hidden, "intermediate_size": self.inner},
            **{"num_hidden_layers": self.layers, "vocab_size": self.vocab, "head_dim": self.head_dim},
            **{"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads},
            **{"num_experts": self.experts, "num_experts_per_tok": self.slots, "moe_intermediate_size": self.inner},
            **{"shared_expert_intermediate_size": self.shared, "max_position_embeddings": self.positions},
            **{"attention_bias": False, "qkv_bias": False},
        }

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's quantised weights."""
        of_heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        experts = {
            **{f"mlp.experts.{each}": self.inner for each in range(self.experts)},
            "mlp.shared_expert": self.shared,
        }
        return {
            **{f"self_attn.{name}_proj": (self.head_dim * count, self.hidden) for name, count in of_heads.items()},
            "self_attn.o_proj": (self.hidden, self.head_dim * self.heads),
            **{f"{name}.{half}_proj": (n, self.hidden) for name, n in experts.items() for half in ("gate", "up")},
            **{f"{name}.down_proj": (self.hidden, n) for name, n in experts.items()},
        }


def write_experts(
    folder: Path,
    settings: Mapping[str, object] | None,
    packer: write.Packer,
    sizes: Sizes,
    others: Mapping[str, write.Packer] | None = None,
) -> dict[str, write.Array]:
    """A model directory: floats in a second file. settings, others, what is returned: as of `write_model`."""
    weights = write.write_model(folder, settings, packer, config=sizes.config, products=sizes.products, others=others)
    random, config = np.random.default_rng(5), json.loads((folder / "config.json").read_text())
    floats = {
        f"model.layers.{layer}.mlp.{name}.weight": (
            DType.F32,
            random.standard_normal((rows, sizes.hidden)).astype(np.float32),
        )
        for layer in range(sizes.layers)
        for name, rows in (("gate", sizes.experts), ("shared_expert_gate", 1))
    }
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    write.save(folder, config, floats)
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    files = [folder / f"model-{number}.safetensors" for number in (1, 2)]
    index = {"weight_map": {name: file.name for file in files for name in write.names(file)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights
