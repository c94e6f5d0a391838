"""nanochat: RMS norms without weights, of the embeddings too, a rotation backwards, and MLPs that square a ReLU.

Queries and keys are normed behind their rotation. Without weights that is the same as before it: a rotation keeps the
length of a row.
"""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, olmo
from ingot.convert.families.gemma2 import read_cap
from ingot.convert.family import takes


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a NanoChatForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, activation="relu2")
    assert model.rope is not None, "read_llama reads it"
    return dataclasses.replace(
        model,
        rope=dataclasses.replace(model.rope, backwards=True),
        qk_norm=QkNorm.HEAD,
        norm_weights=False,
        embedding_norm=True,
        gated_mlp=False,
        logit_cap=read_cap(section, "final_logit_softcapping", 15.0),
    )


_MLP = {
    "layers.{i}/mlp/up/weight": "model.layers.{i}.mlp.fc1.weight",
    "layers.{i}/mlp/down/weight": "model.layers.{i}.mlp.fc2.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="nanochat",
    models="nanochat, such as d32",
    read=read,
    rows=tuple(row for row in olmo.ROWS if "/mlp/" not in row.name) + takes(_MLP),
    nullable=("num_key_value_heads", "final_logit_softcapping"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "nanochat",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
)
