"""CodeGen: a GPT-J whose queries, values and keys lie in one matrix, a quarter of the heads after the other."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import gptj
from ingot.convert.weights import Drop, Row, Split, Swapped, Take
from ingot.errors import ConfigError

_PARTS = 4  # of the heads, for as many processors of the training
_ORDER = ("q", "v", "k")


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a CodeGenForCausalLM; defaults are those of transformers."""
    model = gptj.read(section, names)
    if model.heads % _PARTS:
        raise ConfigError(
            "n_head is not a multiple of 4",
            where=section.place("n_head"),
            expected="a multiple of 4",
            got=str(model.heads),
        )
    return model


_ATTN = "transformer.h.{i}.attn"
_TOGETHER = Swapped(Take(f"{_ATTN}.qkv_proj.weight"), outer=_PARTS, inner=len(_ORDER))

FAMILY = dataclasses.replace(
    gptj.FAMILY,
    name="codegen",
    models="CodeGen 350M to 16B",
    read=read,
    rows=tuple(row for row in gptj.FAMILY.rows if row.name.split("/")[-2] not in _ORDER)
    + tuple(
        Row(f"layers.{{i}}/attn/{x}/weight", Split(_TOGETHER, parts=len(_ORDER), index=index))
        for index, x in enumerate(_ORDER)
    ),
    drops=(*gptj.FAMILY.drops, Drop(f"{_ATTN}.causal_mask")),
    tiny={**gptj.FAMILY.tiny, "model_type": "codegen", "n_head": 4, "rotary_dim": 8},
)
