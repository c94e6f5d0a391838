"""The architectures of llama.cpp that are read."""

from ingot.convert.gguf.architecture import Architecture
from ingot.convert.gguf.combined import COMBINED
from ingot.convert.gguf.dense import DENSE
from ingot.convert.gguf.mixtures import MIXTURES
from ingot.convert.gguf.recurrent import RECURRENT
from ingot.convert.gguf.related import RELATED
from ingot.errors import UnsupportedModelError

# llama.cpp computes SiLU in every such file, also in one that its converter made of a model with ReLU squared.
REASONS = {"bitnet": "they do not say which activation the MLPs have"}

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **MIXTURES, **RECURRENT, **RELATED, **COMBINED}


def find_architecture(name: str, where: str) -> Architecture:
    """By general.architecture. Raises UnsupportedModelError."""
    if name not in ARCHITECTURES:
        reason = f": {REASONS[name]}" if name in REASONS else ""
        raise UnsupportedModelError(
            f"GGUF files of the architecture {name!r} are not read{reason}",
            where=where,
            expected=", ".join(sorted(ARCHITECTURES)),
            got=name,
            hint="convert the model that the file was made from; a new architecture is a row of a table in "
            "convert/gguf, as in dense.py",
        )
    return ARCHITECTURES[name]
