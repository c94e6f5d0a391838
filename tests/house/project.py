"""The repository as the house tests see it: its files and its rooms."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("convert", "builder", "runtime", "plugins", "configs")
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__"}


def pyproject() -> dict[str, object]:
    """The parsed pyproject.toml."""
    return read_toml("pyproject.toml")


def read_toml(name: str) -> dict[str, Any]:
    """A TOML file of the root."""
    with (ROOT / name).open("rb") as file:
        return tomllib.load(file)


def files(*suffixes: str, under: str = ".") -> Iterator[Path]:
    """Files of the repository with one of these suffixes; links to folders are not followed."""
    for path in sorted((ROOT / under).iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name not in SKIPPED:
            yield from files(*suffixes, under=str(path.relative_to(ROOT)))
        elif path.is_file() and path.suffix in suffixes:
            yield path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A Python file, parsed once for all tests that look at it."""
    return ast.parse(path.read_text())


def statements(tree: ast.AST, within: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it is within a function; expressions, which are most of a tree, are passed over."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(tree, field, ())
        for node in inner if isinstance(inner, list) else ():  # the body of a lambda is an expression
            if isinstance(node, ast.stmt):
                yield node, within
            yield from statements(node, within or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def module_name(path: Path) -> str:
    """`convert/families/llama.py` → `ingot.convert.families.llama`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else ("ingot", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> list[Path]:
    """Every Python file that an install of ingot contains."""
    return [path for room in ("src", *ROOMS) for path in files(".py", under=room)]
