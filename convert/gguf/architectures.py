"""The architectures of llama.cpp that are read."""

from ingot.convert.gguf.architecture import Architecture
from ingot.convert.gguf.dense import DENSE
from ingot.convert.gguf.mixtures import MIXTURES
from ingot.convert.gguf.recurrent import RECURRENT
from ingot.errors import UnsupportedModelError

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **MIXTURES, **RECURRENT}


def find_architecture(name: str, where: str) -> Architecture:
    """By general.architecture. Raises UnsupportedModelError."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {name!r} are not read",
            where=where,
            expected=", ".join(sorted(ARCHITECTURES)),
            got=name,
            hint="convert the model that the file was made from; a new architecture is a row of convert/gguf/dense.py, "
            "mixtures.py or recurrent.py",
        )
    return ARCHITECTURES[name]
