"""GLM-4 9B in the form of transformers: a GLM-4 0414 without the norms behind the branches."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import glm4


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GlmForCausalLM."""
    return glm4.read_glm(section)


FAMILY = dataclasses.replace(
    glm4.FAMILY, name="glm", models="GLM-4 9B", read=read, tiny={**glm4.FAMILY.tiny, "model_type": "glm"}
)
