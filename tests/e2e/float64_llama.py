"""A Llama in numpy float64, straight from its Hugging Face directory: nothing of ingot's converter or builder in it."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Float64 = npt.NDArray[np.float64]


class Float64Llama:
    """One batch of sequences, fed token by token: keys and values of every layer stay as they are."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.layers = config["head_dim"], config["num_hidden_layers"]
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        self.weights = {
            name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.cache: list[tuple[Float64, Float64]] = []
        self.position = 0

    def step(self, ids: npt.NDArray[np.int64]) -> Float64:
        """The next token of every sequence, int [batch] → logits [batch, vocab]."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(layer, self._norm(x, prefix + "input_layernorm"), prefix + "self_attn.")
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.")
        self.position += 1
        return self._linear(self._norm(x, "model.norm"), "model.embed_tokens")

    def _linear(self, x: Float64, name: str) -> Float64:
        y: Float64 = x @ self.weights[name + ".weight"].T
        return y

    def _norm(self, x: Float64, name: str) -> Float64:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        normed: Float64 = x / np.sqrt(mean_square + self.eps) * self.weights[name + ".weight"]
        return normed

    def _mlp(self, x: Float64, prefix: str) -> Float64:
        gate, up = self._linear(x, prefix + "gate_proj"), self._linear(x, prefix + "up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "down_proj")

    def _attention(self, layer: int, x: Float64, prefix: str) -> Float64:
        q, k, v = (self._linear(x, f"{prefix}{name}_proj").reshape(len(x), -1, self.head_dim) for name in "qkv")
        keys, values = self._remember(layer, self._turn(k), v)
        group = self.heads // self.kv_heads
        grouped = self._turn(q).reshape(len(x), self.kv_heads, group, self.head_dim)
        scores = np.einsum("bhgd,bthd->bhgt", grouped, keys) / np.sqrt(self.head_dim)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("bhgt,bthd->bhgd", scores / scores.sum(axis=-1, keepdims=True), values)
        return self._linear(mixed.reshape(len(x), -1), prefix + "o_proj")

    def _turn(self, x: Float64) -> Float64:
        """Rotary positions: dimension i turns with dimension i + head_dim / 2."""
        half = self.head_dim // 2
        angle = self.position * self.theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        turned = (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
        return np.concatenate(turned, axis=-1)

    def _remember(self, layer: int, key: Float64, value: Float64) -> tuple[Float64, Float64]:
        new = (key[:, None], value[:, None])
        if layer == len(self.cache):
            self.cache.append(new)
        else:
            old = self.cache[layer]
            self.cache[layer] = (np.concatenate([old[0], new[0]], 1), np.concatenate([old[1], new[1]], 1))
        return self.cache[layer]
