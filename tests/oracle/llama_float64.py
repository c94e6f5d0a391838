"""A llama in float64 numpy, straight from a Hugging Face directory: the reference for greedy tokens.

Independent of every room: it reads safetensors itself and knows nothing of graphs, plans or kernels.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Float64 = npt.NDArray[np.float64]


class LlamaFloat64:
    """Logits of whole sequences, no cache."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: w.astype(np.float64) for name, w in load_file(directory / "model.safetensors").items()}
        half = self.config["head_dim"] // 2
        self.inv_freq = self.config["rope_theta"] ** (-np.arange(half) / half)

    def _linear(self, x: Float64, name: str) -> Float64:
        y: Float64 = x @ self.weights[f"{name}.weight"].T
        return y

    def _norm(self, x: Float64, name: str) -> Float64:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        y: Float64 = x / np.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        return y

    def _rotate(self, x: Float64, positions: npt.NDArray[np.int64]) -> Float64:
        """x [batch, time, heads, dim]"""
        angle = positions[:, None] * self.inv_freq
        cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def logits(self, ids: npt.NDArray[np.int64]) -> Float64:
        """ids [batch, time] → logits [batch, time, vocab]"""
        config, batch, time = self.config, ids.shape[0], ids.shape[1]
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        positions = np.arange(time)
        hidden = self.weights["model.embed_tokens.weight"][ids]
        future = np.triu(np.full((time, time), -np.inf), 1)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = self._norm(hidden, f"{prefix}.input_layernorm")
            q, k, v = (
                self._linear(x, f"{prefix}.self_attn.{name}_proj").reshape(batch, time, -1, dim) for name in "qkv"
            )
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            k, v = np.repeat(k, heads // kv_heads, axis=2), np.repeat(v, heads // kv_heads, axis=2)
            scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1) / np.sqrt(dim) + future
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = (scores @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3).reshape(batch, time, heads * dim)
            hidden = hidden + self._linear(mixed, f"{prefix}.self_attn.o_proj")
            x = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate = self._linear(x, f"{prefix}.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate)) * self._linear(x, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._linear(inner, f"{prefix}.mlp.down_proj")
        hidden = self._norm(hidden, "model.norm")
        return self._linear(hidden, "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens")
