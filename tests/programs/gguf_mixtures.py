"""A GGUF file of a mixture of experts: the width of a real model, few layers, random weights. `gguf_speed` runs it.

    python -m tests.programs.gguf_mixtures lfm2-8b-a1b TOKENIZER_DIR WORK
    python -m tests.programs.gguf_speed none WORK Q4_0

Writes WORK/plain.gguf in float16, as llama.cpp's converter lays the tensors. All experts of a layer have the same
weights. Needs torch and transformers. TOKENIZER_DIR has the tokenizer.json of a model whose tokens are written into the
file.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ingot.export.gguf_tokenizer import gguf_tokenizer
from tests import gguf_files
from tests.convert.gguf import llama_cpp
from tests.convert.gguf.test_architectures import CASES
from tests.real_models import REAL_MODELS

TOKENS = 32000
SMALL = 1 << 20  # elements of a tensor that stays in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """architecture  llama.cpp's name, and that of the case which lays its tensors
    layers        that stay
    change        of config.json
    settings      of the file, where they follow from no key of config.json
    """

    architecture: str
    layers: int
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any]


MIXTURES = {
    "gpt-oss-20b": Mixture(
        architecture="gpt-oss",
        layers=2,
        settings={
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.freq_base": 150000.0},
            **{"rope.scaling.original_context_length": 4096, "expert_feed_forward_length": 2880},
        },
    ),
    "lfm2-8b-a1b": Mixture(
        architecture="lfm2moe",
        layers=6,
        settings={
            **{"attention.head_count_kv": [0, 0, 8, 0, 0, 0], "shortconv.l_cache": 3},
            **{"leading_dense_block_count": 2, "expert_gating_func": 2},
        },
    ),
    "qwen3.5-35b-a3b": Mixture(
        architecture="qwen35moe",
        layers=2,
        change={"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
        settings={
            **{"rope.dimension_sections": [11, 11, 10, 0], "rope.dimension_count": 64, "ssm.conv_kernel": 4},
            **{"ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096},
            **{"full_attention_interval": 2, "expert_shared_feed_forward_length": 512},
        },
    ),
}


def random_tensors(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json with the defaults of transformers, weights by the names of the model class)"""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if made.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02
    found = {}
    for name, shape in shapes.items():
        if len(shape) == 3 and "experts" in name:
            found[name] = np.broadcast_to(np.resize(numbers, shape[1:]), shape)
        else:
            found[name] = np.ones(shape, np.float32) if "norm" in name else np.resize(numbers, shape)
    return made.to_dict(), found


def write_mixture(path: Path, mixture: Mixture, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """A file in float16; small tensors in float32. tokenizer: its settings."""
    full, tensors = random_tensors(config)
    settings = {**llama_cpp.settings_of(full), **mixture.settings}
    document = {"general.architecture": mixture.architecture, "general.file_type": 1, **tokenizer}
    document |= {f"{mixture.architecture}.{key}": value for key, value in settings.items()}
    stored = {
        name: gguf_files.floats(each, gguf_files.F32 if each.ndim == 1 or each.size < SMALL else gguf_files.F16)
        for name, each in llama_cpp.gguf_tensors(full, tensors, CASES[mixture.architecture]).items()
    }
    gguf_files.write_gguf(path, document, stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(MIXTURES), help="the model")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER_DIR")
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder, made if it is not there")
    options = parser.parse_args()
    mixture = MIXTURES[options.name]
    config = {**REAL_MODELS[options.name].cut(mixture.layers), **mixture.change, "vocab_size": TOKENS}
    options.work.mkdir(parents=True, exist_ok=True)
    write_mixture(options.work / "plain.gguf", mixture, config, gguf_tokenizer(options.tokenizer, TOKENS))


if __name__ == "__main__":
    main()
