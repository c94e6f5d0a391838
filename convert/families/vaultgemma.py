"""VaultGemma: a Gemma 2 without norms behind its branches."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma2


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a VaultGemmaForCausalLM; defaults are those of transformers."""
    return dataclasses.replace(gemma2.read(section, names), post_norms=False)


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="vaultgemma",
    models="VaultGemma 1B",
    read=read,
    tiny={**gemma2.FAMILY.tiny, "model_type": "vaultgemma"},
)
