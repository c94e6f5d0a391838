"""What an install brings: numpy and small libraries, neither torch nor CUDA; a small model with its card."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from tests.house.project import ROOT, package_files, pyproject, tree_of
from tests.house.test_imports import OPTIONAL, imports

FORBIDDEN = re.compile(r"^(torch|transformers|onnxruntime|tensorrt|cuda|nvidia|cupy|triton)")


def _project() -> dict[str, object]:
    project = pyproject()["project"]
    assert isinstance(project, dict)
    return project


def _closure(names: Iterator[str]) -> set[str]:
    """Everything that an install of `names` brings on this Python, extras left out."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return seen


def test_the_default_install_brings_neither_torch_nor_cuda() -> None:
    dependencies = _project()["dependencies"]
    assert isinstance(dependencies, list)
    wanted = [Requirement(text) for text in dependencies]
    here = (each.name for each in wanted if each.marker is None or each.marker.evaluate())
    brought = _closure(here)
    assert {"numpy", "onnx", "tokenizers"} <= brought
    assert [name for name in sorted(brought) if FORBIDDEN.match(name.lower())] == []


def test_every_dependency_is_imported_and_every_import_is_a_dependency() -> None:
    dependencies = _project()["dependencies"]
    assert isinstance(dependencies, list)
    modules = {Requirement(text).name.replace("-", "_") for text in dependencies}
    imported = {name.split(".")[0] for path in package_files() for _, name, _ in imports(tree_of(path))}
    assert imported - sys.stdlib_module_names - {"ingot", *OPTIONAL} == (modules - {"protobuf"}) | {"google"}


def test_ci_pins_torch() -> None:
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_licence_is_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert _project()["license"] == "Apache-2.0"


def test_the_shipped_model_is_small_and_has_a_card() -> None:
    folder = ROOT / "src/ingot/shipped"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    card = (folder / "README.md").read_text()
    assert all(word in card for word in ("data", "loss", "licence", "Apache-2.0", "bf16"))
