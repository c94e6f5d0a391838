"""Tiny random Hugging Face models, and what transformers says they compute: the oracle of the golden tests.

    model = tiny_llama(tmp_path / "m", head_dim=12, heads=8, kv_heads=1, vocab=67)
    model.folder            config.json, model.safetensors (as save_pretrained writes them)
    model.logits(ids)       float32 [batch, sequence, vocab]
    model.greedy(ids, 40)   the tokens that follow one prompt

Weights are larger than at the start of a training, so that attention and norms matter and greedy margins are wide.
"""

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from tests.tiny_foreign import settle, store, twin

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Scaled rotary frequencies whose three ranges a tiny model meets."""


AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # which transformers leaves out
torch.set_num_threads(1)  # models this small wait for other threads longer than these save


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    folder: Path
    model: Any

    def logits(self, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """ids [batch, sequence] → float32 [batch, sequence, vocab]"""
        with torch.no_grad():
            logits = self.model(torch.from_numpy(np.asarray(ids, dtype=np.int64))).logits
        result: npt.NDArray[np.float32] = logits.float().numpy()
        return result

    def exact_logits(self, ids: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The same in float64, except what the model's code computes in float32 by name.

        Recurrences amplify rounding errors of float32, which differ from CPU to CPU.
        """
        model = copy.deepcopy(self.model).double()
        try:
            torch.set_default_dtype(torch.float64)
            with torch.no_grad():
                logits = model(torch.from_numpy(np.asarray(ids, dtype=np.int64))).logits
        finally:
            torch.set_default_dtype(torch.float32)
        result: npt.NDArray[np.float64] = logits.double().numpy()
        return result

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely next tokens, one after the other, whatever the end id."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits([ids])[0, -1].argmax()))
        return ids[len(prompt) :]


def logits_by_token(model: Any, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """What `TinyModel.logits` gives, one token after another: transformers has another form of recurrences for whole
    prompts, which rounds otherwise."""
    tokens, cache, rows = torch.from_numpy(np.asarray(ids, dtype=np.int64)), None, []
    # transformers 5.24 renamed it
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    with torch.no_grad():
        for place in range(tokens.shape[1]):
            # Bamba takes every token for the first one where it is not told
            at = {"position_ids": torch.full((len(tokens), 1), place)} if "position_ids" in known else {}
            out = model(input_ids=tokens[:, place : place + 1], use_cache=True, **{name: cache}, **at)
            cache = out[name]
            rows.append(out.logits[:, 0].float().numpy())
    return np.stack(rows, axis=1)


def tiny_model(folder: Path, config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> TinyModel:
    """A model of any family from its config.json values; weights from `seed`, saved in `dtype`, computed in float32."""
    model = random_model(config, seed=seed, dtype=dtype)
    save_model(model, folder, dtype)
    store(folder, config)
    return TinyModel(folder=folder, model=model)


def random_model(config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model in memory. Its parameters have values that `dtype` holds."""
    values = copy.deepcopy(twin(config))  # transformers writes into nested objects
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation=attention_of(hf_config), experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_factor = name.endswith("weight")
                value = 1 + 0.2 * noise if is_factor else 0.2 * noise
            else:
                value = noise * (
                    0.7 if "emb" in name or "wte" in name or "wpe" in name else parameter.shape[-1] ** -0.5
                )
            parameter.copy_(value.to(dtype).float())
        settle(model, config)
        parameters = {name for name, _ in model.named_parameters()}
        for name, buffer in model.state_dict().items():  # the biases of routers, and factors of layers
            if name not in parameters:
                middle = 1 if name.endswith("layer_scalar") else 0
                buffer.copy_((middle + 0.2 * torch.randn(buffer.shape, generator=generator)).to(dtype).float())
    return model


def attention_of(config: Any) -> str:
    """The form of attention that computes what the model does: Falcon's eager one adds ALiBi twice."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    # only parameters are rounded: model.to(dtype) would round the rotary frequencies too
    model.config.dtype = dtype
    model.save_pretrained(folder, state_dict={name: value.to(dtype) for name, value in model.state_dict().items()})


def load_model(folder: Path) -> TinyModel:
    """A model directory as transformers reads it, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    return TinyModel(folder=folder, model=model)


def tiny_llama(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int | None = None,
    inter: int = 84,
    vocab: int = 61,
    positions: int = 128,
    tied: bool = False,
    biases: bool = False,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> TinyModel:
    """hidden: by default heads * 8, so that heads * head_dim is often another number. rope: rope_parameters."""
    values = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden or heads * 8,
        "intermediate_size": inter,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "attention_bias": biases,
        "mlp_bias": biases,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    return tiny_model(folder, values, seed=seed, dtype=dtype)


def tiny_gpt2(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 3,
    head_dim: int = 16,
    inter: int | None = None,
    vocab: int = 61,
    positions: int = 128,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> TinyModel:
    """hidden is heads * head_dim; inter None: four times hidden."""
    values = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": heads * head_dim,
        "n_inner": inter,
        "vocab_size": vocab,
        "n_positions": positions,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **config,
    }
    return tiny_model(folder, values, seed=seed, dtype=dtype)
