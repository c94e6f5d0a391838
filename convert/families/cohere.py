"""Command R and Aya: both branches read one layer norm, no bias; pairs side by side rotate; logits have a factor."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_rope import interleaved
from ingot.errors import UnsupportedModelError


def read_cohere(section: Section, *, theta: float, head_dim: int | None = None) -> ModelConfig:
    """What the families of Cohere share; defaults are those of transformers. head_dim: as in `read_llama`."""
    model = llama.read_llama(
        section, positions=8192, head_dim=head_dim, theta=theta, tied=True, eps_key="layer_norm_eps", eps=1e-5
    )
    return dataclasses.replace(
        model,
        rope=interleaved(model.rope),
        norm=Norm.LAYER,
        norm_bias=False,
        parallel_branches=True,
        shared_norm=True,
        logit_scale=section.number("logit_scale", 0.0625, above=0),
    )


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a CohereForCausalLM."""
    if section.boolean("use_qk_norm", False):
        raise UnsupportedModelError(
            "use_qk_norm true is not supported: ingot has no layer norm of queries and keys",
            where=section.place("use_qk_norm"),
            expected="false",
            got="true",
        )
    return read_cohere(section, theta=5e5)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="cohere",
    models="Command R, Aya 23, Aya Expanse",
    read=read,
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "cohere",
        "logit_scale": 0.25,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
