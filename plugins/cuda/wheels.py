"""Libraries of NVIDIA that pip has installed: wheels put them where no loader looks."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path


def in_wheels(names: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Paths of the libraries called so. parts: folders of the wheels below the package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    places = [Path(folder) / part / name for folder in folders for part in parts for name in names]
    return [str(path) for path in places if path.is_file()]
