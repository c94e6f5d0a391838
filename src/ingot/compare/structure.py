"""Is a plan the one that a source makes? The same steps, wiring, attributes and shapes, whatever the precision."""

import dataclasses
from collections.abc import Iterator, Mapping

from ingot.errors import EngineError
from ingot.plan import Attr, Plan
from ingot.plugins.registry import find_op

PRECISION_ATTRS = frozenset({"activations", "group"})  # an engine's own choice


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Outline:
    """A step without what precision and memory decide. inputs: where each comes from, weights with their shape."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Attr]


def require_same_structure(
    plan: Plan, source: Plan, same: Mapping[str, str], engine_name: str, source_name: str, *, in_stages: bool = False
) -> None:
    """Raises EngineError for the first step that differs. same: weight → the name that all weights have that are one in
    the source; in_stages: pipeline stages take the steps, and what each makes for itself it makes first."""
    sizes, wanted_sizes = _sizes(plan), _sizes(source)
    for name, size in sizes.items():
        if size != wanted_sizes[name]:
            raise _foreign(engine_name, name, str(wanted_sizes[name]), str(size), source_name)
    ours, reference = list(_outlines(plan, same)), list(_outlines(source, same))
    if in_stages:  # who makes what a step reads is compared, whatever the order
        places = {step.name: place for place, step in enumerate(reference)}
        ours.sort(key=lambda step: places.get(step.name, len(places)))
    for mine, wanted in zip(ours, reference, strict=False):
        for field in ("name", "op", "inputs", "outputs", "attrs"):
            got, expected = getattr(mine, field), getattr(wanted, field)
            if got != expected:
                raise _foreign(
                    engine_name, f"kernel call {wanted.name}: {field}", _words(expected), _words(got), source_name
                )
    if len(ours) != len(reference):
        raise _foreign(engine_name, "number of kernel calls", str(len(reference)), str(len(ours)), source_name)


def _sizes(plan: Plan) -> dict[str, int]:
    return {"vocab_size": plan.vocab_size, "max_positions": plan.max_positions, "num_layers": plan.num_layers}


def _outlines(plan: Plan, same: Mapping[str, str]) -> Iterator[_Outline]:
    weights = {weight.name: weight for weight in plan.weights}
    cols = {buffer.name: f"{buffer.cols} columns per row of {buffer.rows.value}" for buffer in plan.buffers}
    made_by: dict[str, str] = {each.name: f"input {each.name}" for each in plan.inputs}
    for step in (find_op(each.op).plain(each) for each in plan.steps):
        op = find_op(step.op)
        if op.rounds:
            made_by[step.outputs[0]] = made_by.get(step.inputs[0], "")
        if op.rounds or op.lists:
            continue
        inputs = tuple(
            f"weight {same.get(name, name)} {weights[name].shape}" if name in weights else made_by.get(name, "")
            for index, name in enumerate(step.inputs)
            if index not in (op.unrounded(step.attrs), op.listed)
        )
        yield _Outline(
            name=step.name,
            op=step.op,
            inputs=inputs,
            outputs=tuple(name and cols[name] for name in step.outputs),
            attrs={key: value for key, value in step.attrs.items() if key not in PRECISION_ATTRS},
        )
        made_by |= {name: f"output {index} of {step.name}" for index, name in enumerate(step.outputs)}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in sorted(value))
    return ", ".join(each or "nothing" for each in value) if isinstance(value, tuple) else str(value)


def _foreign(engine: str, where: str, expected: str, got: str, source: str) -> EngineError:
    return EngineError(
        "the engine was not built from this source: they describe different models",
        where=f"{engine}: {where}",
        expected=f"{expected} (in {source})",
        got=got,
        hint="give the Checkpoint or Hugging Face directory that it was built from, or build it again with this ingot",
    )
