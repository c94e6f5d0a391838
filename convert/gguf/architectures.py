"""The architectures of llama.cpp that are read."""

from ingot.convert.gguf.architecture import Architecture
from ingot.convert.gguf.combined import COMBINED
from ingot.convert.gguf.dense import DENSE
from ingot.convert.gguf.mixtures import MIXTURES
from ingot.convert.gguf.recurrent import RECURRENT
from ingot.convert.gguf.related import RELATED
from ingot.errors import UnsupportedModelError

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **MIXTURES, **RECURRENT, **RELATED, **COMBINED}


def find_architecture(name: str, where: str) -> Architecture:
    """By general.architecture. Raises UnsupportedModelError."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {name!r} are not read",
            where=where,
            expected=", ".join(sorted(ARCHITECTURES)),
            got=name,
            hint="convert the model that the file was made from; a new architecture is a row of a table in "
            "convert/gguf, as in dense.py",
        )
    return ARCHITECTURES[name]
