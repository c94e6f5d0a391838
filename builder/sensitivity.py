"""What the outputs of every product lose on a text, by the precision of its weight and with int8 inputs.

The text runs once, in floats, so that each product is judged by itself. Precisions are those of a build without a
text (`quantise.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ingot.builder.calibrated.methods import Found
from ingot.builder.calibrated.text_model import TextModel
from ingot.builder.calibrated.walk import Parts, walk, weight_name
from ingot.builder.expressions import WeightReader
from ingot.builder.pack import BLOCK_BYTES
from ingot.builder.parallel_map import cores, parallel_map
from ingot.builder.quantise import quantise
from ingot.builder.stored_weight import StoredWeight
from ingot.dtypes import Precision, from_float32, to_float32
from ingot.plan import Step
from ingot.plugins.op import Array
from ingot.plugins.quantised import round_to_int8

_INPUTS = 256  # rows of a product's inputs that count, spread over the text

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductLoss:
    """name    of the product, as recipes call it
    losses  precision → sum of squares of what the outputs lose, over the sum of their squares
    int8    the same of inputs that are rounded to int8
    nbytes  precision → bytes of the packed weight
    """

    name: str
    losses: Mapping[str, float]
    int8: float
    nbytes: Mapping[str, int]


def product_losses(
    text: TextModel, reader: WeightReader, precisions: Sequence[str], progress: Progress
) -> list[ProductLoss]:
    """Every product that a recipe may change, in the order of the plan."""
    names = [step.name for step in text.products() if step.name not in text.steering]
    uses = {use.name: use for use in text.model.lowering.uses}
    parsed = {each: Precision.parse(each) for each in precisions}
    found: list[ProductLoss] = []

    def measure(step: Step, weight: StoredWeight, parts: Parts) -> Sequence[Found]:
        progress(f"measuring {step.name}", len(found), len(names))
        use = uses[weight_name(step)]
        losses, int8 = _losses(weight, parts, parsed)
        packed = (
            dataclasses.replace(use, panels=True, dtype=each.dtype, group=each.group).nbytes for each in parsed.values()
        )
        nbytes = dict(zip(parsed, packed, strict=True))
        found.append(ProductLoss(name=step.name, losses=losses, int8=int8, nbytes=nbytes))
        return ()

    walk(text.plan, text.model.lowering.uses, reader, text.windows, names, measure)
    progress("measured", len(names), len(names))
    return found


def _losses(weight: StoredWeight, parts: Parts, precisions: Mapping[str, Precision]) -> tuple[dict[str, float], float]:
    """(relative squares by precision, those of int8 inputs)"""
    n, k = weight.shape[-2:]
    block = max(1, BLOCK_BYTES // (4 * k))
    inputs = {expert: _sampled(each) for expert, each in parts.items() if sum(map(len, each))}

    def measured(at: tuple[int, int, int]) -> tuple[float, dict[str, float], float]:
        expert, begin, end = at
        x, change = inputs[expert]
        rows = weight.read(expert * n + begin, expert * n + end)
        lost = {name: _squares(x @ (_rounded(rows, each) - rows).T) for name, each in precisions.items()}
        return _squares(x @ rows.T), lost, _squares(change @ rows.T)

    blocks = ((expert, begin, min(begin + block, n)) for expert in inputs for begin in range(0, n, block))
    energy, losses, int8 = 0.0, dict.fromkeys(precisions, 0.0), 0.0
    for squares, lost, rounding in parallel_map(measured, blocks, cores()):
        energy += squares
        int8 += rounding
        losses = {name: losses[name] + lost[name] for name in losses}
    total = energy or 1.0
    return {name: each / total for name, each in losses.items()}, int8 / total


def _sampled(parts: Sequence[Array]) -> tuple[Array, Array]:
    """(some rows of the inputs, what int8 changes of them)"""
    x: Array = np.concatenate(parts)
    x = x[np.linspace(0, len(x) - 1, min(_INPUTS, len(x))).astype(np.intp)]
    codes, scale = round_to_int8(x)
    return x, codes.astype(np.float32) * scale[:, None] - x


def _rounded(rows: Array, precision: Precision) -> Array:
    """What a build makes of rows."""
    if precision.dtype.is_quantised:
        return quantise(rows, precision).values
    return to_float32(from_float32(rows, precision.dtype), precision.dtype)


def _squares(values: Array) -> float:
    return float(np.einsum("tn,tn->", values, values, dtype=np.float64))
