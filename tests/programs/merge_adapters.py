"""Whether `ingot convert --lora` gives the weights that PEFT's own merge gives: small random models, kinds of adapters.

python -m tests.programs.merge_adapters WORK

Needs torch, transformers and peft. Prints the largest difference of a weight in float32, or why ingot merges none.
"""

import argparse
import importlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import to_float32
from ingot.errors import IngotError
from ingot.tensor_file import read_rows

_SIZES = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_LLAMA = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_TIED = {**_LLAMA, "tie_word_embeddings": True}
_RANKS = {"q_proj": 2, "layers.1.mlp.up_proj": 7}
_ALPHAS = {"^model.layers.0.*k_proj": 3, "down_proj": 21}
_TABLE = ["embed_tokens", "q_proj"]
# name → model, its configuration, what the adapter has beside rank 4 and alpha 10
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all linear modules": ("llama", _LLAMA, {}),
    "rslora": ("llama", _LLAMA, {"use_rslora": True}),
    "patterns": ("llama", _LLAMA, {"rank_pattern": _RANKS, "alpha_pattern": _ALPHAS}),
    "DoRA": ("llama", _LLAMA, {"use_dora": True}),
    "whole modules": ("llama", _LLAMA, {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "biases": ("llama", {**_LLAMA, "attention_bias": True}, {"bias": "all"}),
    "biases of LoRA": ("llama", {**_LLAMA, "attention_bias": True}, {"bias": "lora_only"}),
    "token table, lm_head": ("llama", _LLAMA, {"target_modules": [*_TABLE, "lm_head"]}),
    "tied token table": ("llama", _TIED, {"target_modules": _TABLE}),
    "transposed": ("gpt2", _GPT2, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "transposed, token table": ("gpt2", _GPT2, {"target_modules": ["c_attn", "c_proj", "wte"]}),
    "attention of a mixture": ("mixtral", {**_LLAMA, "num_local_experts": 4}, {"target_modules": ["q_proj", "o_proj"]}),
    "tied lm_head": ("llama", _TIED, {"target_modules": ["lm_head", "q_proj"]}),
    "PiSSA": ("llama", _LLAMA, {"init_lora_weights": "pissa"}),
    "rows of the token table": ("llama", _LLAMA, {"trainable_token_indices": [1, 2]}),
}


def weights(folder: Path, **options: Any) -> dict[str, Any]:
    """Those of a Checkpoint, made anew, in float32."""
    shutil.rmtree(folder, ignore_errors=True)
    convert(ConvertOptions(output_dir=folder, **options))
    return {name: to_float32(read_rows(each), each.dtype) for name, each in Checkpoint.open(folder).tensors().items()}


def make(work: Path, name: str) -> None:
    """Base model, adapter, and what PEFT makes of both."""
    import torch
    import transformers

    peft: Any = importlib.import_module("peft")  # no extra installs it
    kind, config, more = KINDS[name]
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(kind, **config)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(work / "base")
    given = {"r": 4, "lora_alpha": 10, "target_modules": "all-linear", **more}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    adapted.save_pretrained(work / "adapter")
    adapted.merge_and_unload().save_pretrained(work / "merged")


def said(work: Path, name: str) -> str:
    """What comes of a kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(work, name)
    try:
        found = weights(work / "found", model_dir=work / "base", lora=work / "adapter")
    except IngotError as error:
        return f"refused: {error.what}"
    wanted, before = (
        weights(work / "wanted", model_dir=work / "merged"),
        weights(work / "before", model_dir=work / "base"),
    )
    largest = max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
    changed = sum(not np.array_equal(found[name], before[name]) for name in before)
    return f"{largest:.1e}, {changed} of {len(before)} weights changed"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    print("| adapter | largest difference |\n|---|---|")
    for number, name in enumerate(KINDS):
        print(f"| {name} | {said(work / str(number), name)} |", flush=True)


if __name__ == "__main__":
    main()
