"""Finds ops and targets by name; one sentence when nothing fits."""

import functools
import importlib
import pkgutil

import ingot.plugins.ops as ops_package
from ingot.errors import PassError
from ingot.plugins.op import Op


@functools.cache
def find_op(name: str) -> Op:
    """The op defined in `plugins/ops/<name>.py`. Raises PassError for an unknown name."""
    if name not in op_names():
        raise PassError(f"there is no op {name!r}", expected=", ".join(op_names()), hint=f"add plugins/ops/{name}.py")
    op = importlib.import_module(f"ingot.plugins.ops.{name}").OP
    assert isinstance(op, Op), f"plugins/ops/{name}.py must define OP"
    assert op.name == name, f"the OP of plugins/ops/{name}.py is named {op.name!r}"
    return op


@functools.cache
def op_names() -> tuple[str, ...]:
    """Every op, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(ops_package.__path__)))
