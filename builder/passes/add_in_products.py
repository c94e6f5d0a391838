"""What a norm adds to a product is added by the product, which then comes right before the norm.

    product ▶ branch, norm(branch + stream) ▶ y, sum        product + stream ▶ sum, norm(sum) ▶ y

`fuse_residual_norm` has given all sums to the norms; this is for targets whose products add.
"""

import dataclasses
from collections import Counter

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.plugins.registry import find_op

NAME = "add_in_products"


def add_in_products(program: Program) -> tuple[Program, PassReport]:
    """A product whose result others read too, or that adds already, stays as it is."""
    writers = {value: step for step in program.steps for value in step.outputs}
    readers = Counter(ref for step in program.steps for ref in step.inputs)
    values, refused = list(program.values), Counter[str]()
    products: dict[str, Draft] = {}  # norm → the product before it, as it is now
    for norm in program.steps:
        added = _added(norm) if find_op(norm.op).norms else None
        if added is None:
            continue
        branch = norm.inputs[0]
        assert isinstance(branch, int), "a norm reads an activation"
        product = writers[branch]
        if (reason := _refusal(product, readers[branch])) is not None:
            refused[reason] += 1
            continue
        total = norm.outputs[1]
        if total is None:  # the product's value becomes the sum, which has no name in the graph any more
            total, values[branch] = branch, dataclasses.replace(values[branch], tensor="")
        products[norm.name] = dataclasses.replace(_adding(product, added), outputs=(total,))
    moved = {product.name for product in products.values()}
    steps: list[Draft] = []
    for step in program.steps:
        if (found := products.get(step.name)) is not None:
            plain = _adding(step, None)
            inputs = (found.outputs[0], *plain.inputs[1:])
            steps += [found, dataclasses.replace(plain, inputs=inputs, outputs=(step.outputs[0], None))]
        elif step.name not in moved:
            steps.append(step)
    report = PassReport(name=NAME, fired=len(products), refused=dict(refused))
    return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report


def _refusal(product: Draft, readers: int) -> str | None:
    """Why what a norm adds is not added by the step that writes what it is added to."""
    if readers > 1:
        return "another kernel call reads the product without the residual"
    op = find_op(product.op)
    if op.packed is None or op.residual is None:
        return f"what the norm reads comes from {product.op}"
    return None if _added(product) is None else "the product has a residual already"


def _added(step: Draft) -> str | int | None:
    """What a step adds, if its op can and there is something."""
    at = find_op(step.op).residual
    return None if at is None else step.inputs[at]


def _adding(step: Draft, added: str | int | None) -> Draft:
    """The step with something else to add, or nothing."""
    at = find_op(step.op).residual
    return dataclasses.replace(step, inputs=tuple(added if i == at else ref for i, ref in enumerate(step.inputs)))
