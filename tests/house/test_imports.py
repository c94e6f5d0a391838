"""Who may import whom: rooms never import each other, nothing imports upwards, fences around big libraries."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.project import ROOT, module_name, package_files, statements, tree_of

# What a module may import of ingot, longest prefix first; the hall's modules by name. "*": everything.
MAY = {
    "ingot.errors": "",
    "ingot.weight_formats": "",
    "ingot.dtypes": "errors weight_formats",
    "ingot.configs": "errors dtypes configs",
    "ingot.plan_tiles": "configs",
    "ingot.plan": "errors dtypes configs plan_tiles",
    "ingot.plan_check": "errors dtypes plan",
    "ingot.plan_json": "errors configs plan plan_check",
    "ingot.step_io": "errors dtypes plan",
    "ingot.step_inputs": "errors dtypes plan step_io",
    "ingot.step_work": "errors dtypes plan",
    "ingot.timed_run": "errors dtypes plan fixed_tables step_io step_work",
    "ingot.fixed_tables": "errors dtypes plan step_io",
    "ingot.chunks": "errors configs",
    "ingot.lost_codes": "",
    "ingot.manifest": "errors dtypes configs plan plan_tiles chunks",
    "ingot.output_dir": "errors",
    "ingot.resource_estimate": "errors configs",
    "ingot.tensor_file": "errors dtypes configs chunks",
    "ingot.companions": "errors configs",
    "ingot.checkpoint": "errors dtypes configs output_dir tensor_file chunks",
    "ingot.weights_memory": "errors plan",
    "ingot.engine": "errors dtypes configs chunks plan plan_json manifest weights_memory engine",
    "ingot.engine_writer": "errors dtypes configs chunks plan manifest engine output_dir",
    "ingot.plugins": "errors weight_formats dtypes configs plan plan_tiles plan_check plan_json step_io step_inputs "
    "step_work weights_memory plugins _cpu",
    "ingot.convert": "errors dtypes configs chunks companions checkpoint tensor_file output_dir "
    "resource_estimate convert",
    "ingot.builder": "errors weight_formats dtypes configs chunks companions checkpoint tensor_file output_dir "
    "resource_estimate plan plan_tiles plan_check manifest engine engine_writer step_io step_inputs step_work "
    "timed_run fixed_tables weights_memory lost_codes plugins builder",
    "ingot.runtime": "errors dtypes configs companions plan step_io manifest engine weights_memory plugins runtime",
}
TOP = (
    "ingot",
    "ingot.__main__",
    "ingot.cli",
    "ingot.build_info",
    "ingot.advise",
    "ingot.planner",
    "ingot.calibrated_build",
    "ingot.calibration_text",
    "ingot.cache_info",
    "ingot.inspect",
    "ingot.step_table",
    "ingot.plotting",
    "ingot.verify",
    "ingot.doctor",
    "ingot.quickstart",
    "ingot.llm",
    "ingot.engine_cache",
    "ingot.export",
    "ingot.bench",
    "ingot.compare",
)

# Library → where it may be imported.
FENCES = {
    "onnx": (
        "ingot.convert.alibi",
        "ingot.convert.decoder",
        "ingot.convert.experts",
        "ingot.convert.latent",
        "ingot.convert.mlp",
        "ingot.convert.positions",
        "ingot.convert.recurrent",
        "ingot.builder",
        "ingot.plugins.tensorrt",
        "ingot.inspect",
        "ingot.verify",
    ),
    "onnx_graphsurgeon": ("ingot.builder",),
    "onnxruntime": (),
    "tensorrt": ("ingot.plugins",),
    "tensorrt_rtx_bindings": ("ingot.plugins",),
    "cuda": ("ingot.plugins",),
    "torch": (),
    "transformers": (),
    "click": ("ingot.cli",),
    "rich": ("ingot.cli", "ingot.runtime.llm_progress"),
    "tokenizers": (
        "ingot.companions",
        "ingot.runtime.tokenizer",
        "ingot.runtime.control_tokens",
        "ingot.runtime.guided",
    ),
    "jinja2": ("ingot.runtime.chat_template",),
    "markupsafe": ("ingot.runtime.template_text",),
    "pydantic": (
        "ingot.runtime.server.protocol",
        "ingot.runtime.server.messages_protocol",
        "ingot.runtime.server.responses_protocol",
        "ingot.runtime.server.other_tools",
        "ingot.runtime.server.body",
    ),
    "pydantic_core": ("ingot.runtime.server.protocol", "ingot.runtime.server.body"),
    "prometheus_client": ("ingot.runtime.server.metrics",),
    "starlette": ("ingot.runtime.server",),
    "httpx": ("ingot.bench.http_client",),
    "matplotlib": ("ingot.plotting",),
    "opentelemetry": ("ingot.runtime.server.tracing",),
    "nixl": ("ingot.runtime.server.nixl_blocks",),
    "uvicorn": ("ingot.runtime.server.http_server", "ingot.runtime.server.connection"),
    "h11": ("ingot.runtime.server.connection",),
    "ingot._cpu": ("ingot.plugins.cpu.native",),
}
OPTIONAL = {  # extras: may be imported inside functions
    "tensorrt",
    "cuda",
    "pydantic",
    "pydantic_core",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "h11",
    "httpx",
    "llguidance",
    "matplotlib",
    "opentelemetry",
    "nixl",
}


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Every import statement with the module, or the member of `ingot`, that it names; whether it is in a function."""
    for node, within in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, within) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "ingot" else [base]
            yield from ((node, name, within) for name in names)


def _within(module: str, prefixes: tuple[str, ...] | list[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def _rule(module: str) -> str | None:
    """What `module` may import, or None where no rule names it."""
    found = [prefix for prefix in MAY if _within(module, [prefix])]
    return MAY[max(found, key=len)] if found else None


def problems(path: Path, tree: ast.Module) -> list[str]:
    """Every import in a file at `path` that breaks a rule."""
    module, found = module_name(path), list[str]()
    top = _within(module, TOP[1:]) or module == "ingot"
    for node, name, within in imports(tree):
        place = f"{path.relative_to(ROOT)}:{node.lineno}: import {name}"
        if name.startswith("."):
            found.append(f"{place}: relative")
        if within and name.split(".")[0] not in OPTIONAL:
            found.append(f"{place}: inside a function")
        found += [
            f"{place}: only in {', '.join(where) or 'tests'}"
            for fence, where in FENCES.items()
            if _within(name, [fence]) and not _within(module, where)
        ]
        if not name.startswith("ingot.") or name == "ingot.__version__" or top:
            continue
        rule = _rule(module)
        if rule is None:
            found.append(f"{place}: {module} has no row in MAY")
        elif not _within(name, [f"ingot.{allowed}" for allowed in rule.split()]):
            found.append(f"{place}: {module} may import only {rule}")
    return found


def test_imports_follow_the_directions() -> None:
    assert [problem for path in package_files() for problem in problems(path, tree_of(path))] == []


@pytest.mark.parametrize(
    ("place", "text", "why"),
    [
        ("convert/convert.py", "from ingot.builder.build import build", "may import only"),
        ("runtime/executor.py", "from ingot.convert import families", "may import only"),
        ("src/ingot/plan.py", "import ingot.plugins.op", "may import only"),
        ("builder/build.py", "from ingot import cli", "may import only"),
        ("runtime/executor.py", "import onnx", "only in"),
        ("builder/build.py", "from torch import nn", "only in"),
        ("builder/build.py", "from .passes import base", "relative"),
        ("src/ingot/new_thing.py", "from ingot.errors import IngotError", "no row"),
        ("builder/build.py", "def f():\n    import json\n    return json", "inside a function"),
    ],
)
def test_each_rule_finds_its_offender(place: str, text: str, why: str) -> None:
    assert any(why in problem for problem in problems(ROOT / place, ast.parse(text)))


def test_allowed_imports_pass() -> None:
    text = "import json\nimport numpy as np\nfrom ingot.plan import Plan\nfrom ingot.plugins.op import Op\n"
    assert problems(ROOT / "builder/lower.py", ast.parse(text)) == []
    assert {name.split(".")[0] for _, name, _ in imports(ast.parse(text))} - {
        "ingot",
        "numpy",
    } <= sys.stdlib_module_names
