"""Why `auto` stores a weight as w8 although the checkpoint has codes of it: a reason in words for each such weight."""

import fnmatch
import math
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from ingot.builder.dequantise import is_dequantised
from ingot.builder.graph import is_op, producer, weight_shape
from ingot.builder.kept import kept_precision, pieces_of, read_grid, w8_parts
from ingot.builder.pack import WeightUse
from ingot.builder.passes.split_sums import whole_name
from ingot.builder.precision import LM_HEAD, keeps
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType
from ingot.plugins.target import Target


def lost_codes(uses: Sequence[WeightUse], config: BuildConfig, target: Target, *, units: int) -> dict[str, str]:
    """Matmul → why the codes of its weight are not kept, of those where `auto` would have kept codes. units: as
    `kept_precision`."""
    if config.precision != "auto":
        return {}
    patterns = [rule.pattern for rule in config.layers if rule.precision is not None]
    head = config.screen_lm_head or config.lm_head_precision is not None
    found = {}
    for use in uses:
        name = whole_name(use.name.removesuffix(".weight"))
        asked = any(fnmatch.fnmatch(name, pattern) for pattern in patterns) or (head and name == LM_HEAD)
        lost = use.panels and use.dtype is DType.W8 and not asked
        if lost and (reason := _reason(use.tensor, config, target, units)):
            found[name] = f"stored as w8, because {reason}"
    return found


def _reason(tensor: gs.Tensor, config: BuildConfig, target: Target, units: int) -> str:
    """ "" of a weight that has no codes, or whose codes w8 holds."""
    *outer, columns = weight_shape(tensor)
    everything = [piece.tensor for piece in pieces_of(tensor, 0, math.prod(outer), 0, columns)]
    parts = [each for each in everything if is_dequantised(each)]
    if not parts or all(w8_parts(each) for each in parts):
        return ""
    if len(parts) > 1 and len(weight_shape(tensor)) == 3 and any(map(_is_ordered, parts)):
        return "its experts have orders of columns of their own (desc_act), and read the same inputs"
    if any(map(_is_ordered, parts)):
        return f"the checkpoint orders its columns in its own way (desc_act, actorder), {_no_order(config, target)}"
    grids = [read_grid(each) for each in parts]
    if None in grids:
        return "its scales do not belong to groups of a row's columns"
    if groups := [grid.group for grid in grids if grid is not None and grid.engine_group == 0]:
        return f"16 does not divide its groups of {groups[0]} columns"
    if len(parts) < len(everything):
        return "others of its rows are floats in the checkpoint"
    precision = kept_precision(tensor, units=units)
    if precision is None:
        return "its rows have codes of several kinds"
    if keeps(config, target, precision):
        return "it is part of a matmul with other weights whose codes are not kept"
    if config.activations == "int8" and precision.dtype is DType.F8:
        return "matmuls with FP8 weights take no int8 inputs, which --activations int8 asks for"
    return f"{target.name} has no matmul with {precision} weights"


def _no_order(config: BuildConfig, target: Target) -> str:
    if config.refit:
        return "and with --refit new weights may come in another order"
    if config.parts > 1:
        option = f"--tp_size {config.tp_size}" if config.tp_size > 1 else f"--sum_parts {config.parts}"
        return f"and {option} cannot divide them into equal parts of whole heads"
    return f"and {target.name} cannot put inputs in that order"


def _is_ordered(tensor: gs.Tensor) -> bool:
    """Whether its columns are in another order than its scales."""
    node = producer(tensor)
    return is_op(node, "Gather") and len(weight_shape(tensor)) == 2 and len(weight_shape(node.inputs[1])) == 1
