"""Lists of ops: code asks an op's spec what it is, so that a new op needs no entry in a list elsewhere."""

import ast
from collections.abc import Iterator, Sequence

import pytest

from ingot.builder.select import ATTENTIONS, plugin_of
from ingot.plugins.registry import op_names
from tests.house.project import ROOT, package_files, tree_of

PLUGINS = {*map(plugin_of, op_names()), *ATTENTIONS}
# Words that are also names of attributes, of other values, or of ONNX's ops.
COMMON = {"activation", "add", "sample", "scale", "softcap", "Activation", "Add", "Sample", "Scale"}
SPECIFIC = {*op_names(), *PLUGINS} - COMMON

# file → why it may list ops
MAY_LIST = {
    "builder/passes/split_sums.py": "of which steps the products are whose sums ranks divide",
    "builder/select.py": "plugins that become several steps",
    "plugins/cuda/bind.py": "the kernels that the target has, by op",
    "src/ingot/plan_check.py": "a pipeline stage begins with recv and ends with send",
    "plugins/tensorrt/lowering.py": "how the target computes each op",
}


def lists(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """(line, names) of every collection or call that names two ops or more, and of every comparison of an op's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            given: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            given = [*node.keys]
        elif isinstance(node, ast.Call):
            given = [*node.args]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "op":
            inner = [each for part in node.comparators for each in ast.walk(part)]
            if found := words(inner) & {*op_names()}:
                yield node.lineno, sorted(found)
            continue
        else:
            continue
        if len(found := words(given) & SPECIFIC) > 1:
            yield node.lineno, sorted(found)


def words(nodes: Sequence[ast.AST | None]) -> set[str]:
    """The strings among them."""
    return {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def test_no_file_lists_ops() -> None:
    found: dict[str, list[str]] = {}
    for path in package_files():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("plugins/ops/"):
            each = [f"{name}:{line}: {', '.join(ops)}" for line, ops in lists(tree_of(path))]
            found |= {name: each} if each else {}
    listed = [place for name, places in found.items() if name not in MAY_LIST for place in places]
    assert listed == [], "ask the op's spec by a property that says what the op is: plugins/op.py has them"
    assert sorted(MAY_LIST.keys() - found.keys()) == [], "they list no ops any more"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('_NORMS = ("RmsNorm", "LayerNorm")', ["LayerNorm", "RmsNorm"]),
        ('NARROW = frozenset({"matmul", "rms_norm", "add"})', ["matmul", "rms_norm"]),
        ('places = {"moe_gate_up": 2, "moe_down": 3}', ["moe_down", "moe_gate_up"]),
        ('ours(node, "CausalConv", "LinearAttention")', ["CausalConv", "LinearAttention"]),
        ('found = step.op == "matmul"', ["matmul"]),
        ('found = step.op in ("softcap", "scale")', ["scale", "softcap"]),
        ('found = step.op.startswith("x") or step.op != "moe_route"', ["moe_route"]),
        ('ours(node, *PRODUCTS, "Embedding", "Matmul")', ["Embedding", "Matmul"]),
    ],
)
def test_each_list_is_noticed(code: str, names: list[str]) -> None:
    assert [found for _, found in lists(ast.parse(code))] == [names]


@pytest.mark.parametrize(
    "code",
    [
        'graph.insert("Matmul", [x, "weight"], {"activation": "none"})',
        'keys = {"scale": 1.0, "softcap": 2.0, "activation": "silu"}',
        'node.op in ("Add", "Mul", "Sub", "Div")',
        'ours(node, "Matmul")',
    ],
)
def test_single_names_and_common_words_pass(code: str) -> None:
    assert list(lists(ast.parse(code))) == []
