"""Finds ops and targets by name; one sentence when nothing fits."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ingot.plugins as plugins_package
import ingot.plugins.ops as ops_package
from ingot.errors import PassError, TargetError, UsageError
from ingot.plan import Plan
from ingot.plugins.op import Op
from ingot.plugins.target import EnginePart, Target


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


def targets(names: Sequence[str] | None = None) -> tuple[Target, ...]:
    """Every target, by family; within a family the best first.

    A family is a module `target` or `*_target` of a folder, which lists its `TARGETS`: cpu/amx, cpu/avx512bf16,
    cpu/avx512, cpu/avxvnni, cpu/avx2.
    The names of targets begin with their folder's.

    names  only folders are imported in which these may be: engines start in less time than all targets take
    """
    wanted = [each for each in _folders() if names is None or any(name.startswith(each) for name in names)]
    return tuple(target for folder in wanted for target in _family(folder))


@functools.cache
def _folders() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(plugins_package.__path__) if module.ispkg))


@functools.cache
def _family(folder: str) -> tuple[Target, ...]:
    """The targets of a folder of plugins."""
    package = importlib.import_module(f"ingot.plugins.{folder}")
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(
        target
        for name in modules
        if name == "target" or name.endswith("_target")
        for target in importlib.import_module(f"{package.__name__}.{name}").TARGETS
    )


def find_target(name: str) -> Target:
    """The target called `name`; a family's name alone ("cpu") means its best member that this machine can run.

    Raises UsageError for an unknown name, TargetError where a family has no member for this machine.
    """
    every = targets([name]) or targets()
    if exact := next((target for target in every if target.name == name), None):
        return exact
    family = [target for target in every if target.name.split("/")[0] == name]
    if not family:
        known = sorted({each for target in targets() for each in (target.name, target.name.split("/")[0])})
        raise UsageError(
            f"there is no target {name!r}", expected=", ".join(known), hint="`ingot help targets` explains them"
        )
    lacks = [(target.name, target.run_blocker()) for target in family]
    if best := next((target for target, (_, why) in zip(family, lacks, strict=True) if why is None), None):
        return best
    raise TargetError(
        f"this machine runs no {name} target",
        got="; ".join(f"{member}: {why}" for member, why in lacks),
        hint="name a target to build for another machine, or use --target ref",
    )


def find_targets(names: str) -> tuple[Target, ...]:
    """The targets of a list such as "cpu/avx2,cuda/sm90"; one that is named twice is taken once.

    Raises UsageError, TargetError as `find_target`.
    """
    wanted = [name.strip() for name in names.split(",")]
    if not all(wanted):
        raise UsageError("--target has an empty name in its list", where="--target", got=repr(names))
    found = {target.name: target for target in map(find_target, wanted)}
    return tuple(found.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Targets of an engine that this machine runs, the preferred one first; why it does not run the others, a line
    for each. where: the engine; here: where it runs none, the target to build for this machine, capped as
    it was asked for."""

    where: str
    here: str
    runs: tuple[Target, ...]
    reasons: dict[str, str]

    def lines(self) -> list[str]:
        """Every reason with the name of its target."""
        return [why if why.startswith(name) else f"{name}: {why}" for name, why in self.reasons.items()]

    def best(self) -> Target:
        """The one to run. Raises TargetError with every target's reason."""
        if self.runs:
            return self.runs[0]
        lines = [f"\n    {line}" for line in self.lines()]
        common = set(self.reasons.values())
        raise TargetError(
            "this machine cannot run the engine",
            where=self.where,
            expected=" or ".join(self.reasons),
            got=common.pop() if len(common) == 1 else "".join(lines),
            hint=f"rebuild it for this machine: ingot build --target {self.here}; or run it on a machine that has what "
            "it needs (`ingot doctor` lists what this one has)",
        )


def fit_targets(
    names: Sequence[str],
    *,
    where: str,
    wanted: str | None = None,
    isa: str | None = None,
    plan: Callable[[str], Plan] | None = None,
) -> Fit:
    """What this machine, capped to `isa`, makes of the targets of an engine.

    plan    reads that of a target; `where` is then the engine's directory. None: names alone decide
    wanted  one of `names`, or a family of them ("cpu"): only these are looked at
    Raises UsageError for one that the engine has not, EngineError where a plan cannot be read.
    """
    asked = [name for name in names if wanted is None or wanted in (name, name.split("/")[0])]
    if not asked:
        raise UsageError(
            f"the engine has no target {wanted}",
            where=where,
            expected=", ".join(names),
            got=wanted,
            hint="give one of these, or build the engine for it with --target",
        )
    known = sorted((target for target in targets(asked) if target.name in asked), key=lambda target: not target.on_gpu)
    reasons = {name: f"this ingot does not have {name}: install one that has it" for name in asked}
    if isa is not None and not all(target.on_gpu for target in known):  # a cap on the CPU asks for the CPU
        reasons |= {target.name: f"--isa {isa} asks for a CPU" for target in known if target.on_gpu}
        known = [target for target in known if not target.on_gpu]
    runs = []
    for target in known:
        part = None if plan is None else EnginePart(plan=functools.partial(plan, target.name), directory=Path(where))
        if (reason := target.run_blocker(isa, part)) is None:
            runs.append(target)
            del reasons[target.name]
        else:
            reasons[target.name] = reason
    here = "" if runs else next((each.name for each in targets(["cpu"]) if each.run_blocker(isa) is None), "ref")
    return Fit(where=where, here=here, runs=tuple(runs), reasons=reasons)
