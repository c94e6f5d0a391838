"""Size budgets: what grows past them is split by idea."""

import ast
import re
from pathlib import Path

from tests.house.project import ROOT, files, package_files, statements, tree_of

PYTHON_FILE, CPP_FILE, FUNCTION, CLASS = 400, 600, 60, 300  # lines


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Without the signature, which the formatter may spread over one line per argument."""
    assert node.end_lineno is not None
    return node.end_lineno - node.body[0].lineno + 2


def too_large(path: Path, text: str, tree: ast.Module | None = None) -> list[str]:
    """What in the text of one file is over its budget. tree: that of a Python file, where it is there already."""
    lines, found = text.count("\n"), []
    if lines > (PYTHON_FILE if path.suffix == ".py" else CPP_FILE):
        found.append(f"{path}: {lines} lines")
    if path.suffix != ".py":
        return found
    for node, _ in statements(tree or ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > FUNCTION:
            found.append(f"{path}:{node.lineno}: function {node.name} has {_length(node)} lines")
        if isinstance(node, ast.ClassDef) and _length(node) > CLASS:
            found.append(f"{path}:{node.lineno}: class {node.name} has {_length(node)} lines")
    return found


def test_files_functions_and_classes_keep_their_budgets() -> None:
    parsed = set(package_files())  # by other tests of the house, too
    found = [
        problem
        for path in files(".py", ".cpp", ".h", ".cu", ".cuh")
        for problem in too_large(path.relative_to(ROOT), path.read_text(), tree_of(path) if path in parsed else None)
    ]
    assert found == []


def test_each_budget_is_noticed() -> None:
    body = "    x = 1\n"
    assert too_large(Path("a.py"), "x = 1\n" * 401) == ["a.py: 401 lines"]
    assert too_large(Path("a.cpp"), "int x;\n" * 600) == []
    assert too_large(Path("a.cpp"), "int x;\n" * 601) == ["a.cpp: 601 lines"]
    assert too_large(Path("a.py"), "def f():\n" + body * 60) == ["a.py:1: function f has 61 lines"]
    assert too_large(Path("a.py"), "class C:\n" + body * 300) == ["a.py:1: class C has 301 lines"]


def begins_with_docstring(text: str) -> bool:
    """Whether the first thing in a module, after comments, is a text of its own."""
    return re.match(r"""(\s|#[^\n]*\n)*[rR]?["']""", text) is not None


def test_a_module_without_a_docstring_is_noticed() -> None:
    assert all(map(begins_with_docstring, ("'What.'\n", '#!/bin/python\n\nr"What."\n')))
    assert not any(map(begins_with_docstring, ("import re\n", "# What.\nx = 'y'\n")))


def test_modules_begin_with_a_docstring() -> None:
    texts = {path: path.read_text() for path in files(".py")}
    silent = [path for path, text in texts.items() if text.strip() and not begins_with_docstring(text)]
    assert silent == [], "say in a few lines what each turns into what"


def test_intrinsics_appear_only_in_isa_files() -> None:
    isa = re.compile(r"(^simd_|_(avx2|avxvnni|avx512|amx|pclmul)$)")
    offenders = [
        path
        for path in files(".cpp", ".h", under="plugins")
        if "immintrin.h" in path.read_text() and not isa.search(path.stem)
    ]
    assert offenders == []
