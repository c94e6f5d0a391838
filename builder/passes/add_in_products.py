"""What a norm adds to a product is added by the product, which then comes right before the norm.

    product ▶ branch, norm(branch + stream) ▶ y, sum        product + stream ▶ sum, norm(sum) ▶ y

`fuse_residual_norm` has given all sums to the norms; this is for targets whose products add.
"""

import dataclasses
from collections import Counter

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program

NAME = "add_in_products"
_RESIDUAL = {"matmul": 3, "rms_norm": 2, "layer_norm": 3}  # op → its input that is added
_NORMS = ("rms_norm", "layer_norm")


def add_in_products(program: Program) -> tuple[Program, PassReport]:
    """A product whose result others read too, or that adds already, stays as it is."""
    writers = {value: step for step in program.steps for value in step.outputs}
    readers = Counter(ref for step in program.steps for ref in step.inputs)
    values, refused = list(program.values), Counter[str]()
    products: dict[str, Draft] = {}  # norm → the product before it, as it is now
    for norm in program.steps:
        if norm.op not in _NORMS or norm.inputs[_RESIDUAL[norm.op]] is None:
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
        inputs = (*product.inputs[:-1], norm.inputs[_RESIDUAL[norm.op]])
        products[norm.name] = dataclasses.replace(product, inputs=inputs, outputs=(total,))
    moved = {product.name for product in products.values()}
    steps: list[Draft] = []
    for step in program.steps:
        if (found := products.get(step.name)) is not None:
            norm = dataclasses.replace(
                step, inputs=(found.outputs[0], *step.inputs[1:-1], None), outputs=(step.outputs[0], None)
            )
            steps += [found, norm]
        elif step.name not in moved:
            steps.append(step)
    report = PassReport(name=NAME, fired=len(products), refused=dict(refused))
    return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report


def _refusal(product: Draft, readers: int) -> str | None:
    """Why what a norm adds is not added by the step that writes what it is added to."""
    if readers > 1:
        return "another step reads the product without the residual"
    if product.op != "matmul":
        return f"what the norm reads comes from {product.op}"
    return None if product.inputs[_RESIDUAL["matmul"]] is None else "the product has a residual already"
