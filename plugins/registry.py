"""Finds ops and targets by name; one sentence when nothing fits."""

import functools
import importlib
import importlib.util
import pkgutil

import ingot.plugins as plugins_package
import ingot.plugins.ops as ops_package
from ingot.errors import PassError, TargetError, UsageError
from ingot.plugins.op import Op
from ingot.plugins.target import Target


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


def targets() -> tuple[Target, ...]:
    """Every target, by family; within a family the best first.

    A family is a folder with a `target.py` that lists its `TARGETS`, e.g. cpu/amx, cpu/avx512, cpu/avx2.
    """
    found: list[Target] = []
    for folder in sorted(module.name for module in pkgutil.iter_modules(plugins_package.__path__) if module.ispkg):
        module_name = f"ingot.plugins.{folder}.target"
        if importlib.util.find_spec(module_name) is not None:
            found.extend(importlib.import_module(module_name).TARGETS)
    return tuple(found)


def find_target(name: str) -> Target:
    """The target called `name`; a family's name alone ("cpu") means its best member that this machine can run.

    Raises UsageError for an unknown name, TargetError where a family has no member for this machine.
    """
    every = targets()
    if exact := next((target for target in every if target.name == name), None):
        return exact
    family = [target for target in every if target.name.split("/")[0] == name]
    if not family:
        known = sorted({target.name for target in every} | {target.name.split("/")[0] for target in every})
        raise UsageError(f"there is no target {name!r}", expected=", ".join(known), hint="`ingot doctor` lists them")
    lacks = [(target.name, target.missing()) for target in family]
    if best := next((target for target, (_, why) in zip(family, lacks, strict=True) if why is None), None):
        return best
    raise TargetError(
        f"this machine runs no {name} target", got="; ".join(f"{member}: {why}" for member, why in lacks),
        hint="name a target to build for another machine, or use --target ref",
    )  # fmt: skip
