"""Which precision and activations every product gets: options first, then the recipe's patterns."""

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import onnx_graphsurgeon as gs

from ingot.builder.expressions import stored_dtypes
from ingot.builder.graph import Graph, weight_shape
from ingot.builder.kept import held_by_w8, kept_precision
from ingot.builder.node_kinds import decides, is_matmul, is_monotone, is_of_heads, is_product, reads_table, specs
from ingot.configs.build import BuildConfig
from ingot.dtypes import PRECISIONS, DType, Precision
from ingot.errors import NoKernelError, UsageError
from ingot.plugins.f8_rows import INPUT_GROUPS
from ingot.plugins.ops.gather_columns import OP as GATHER
from ingot.plugins.ops.join_columns import OP as JOIN
from ingot.plugins.target import Target
from ingot.weight_formats import KEPT, QUANTISED, TABLE_FORMAT

LM_HEAD = "lm_head"
Kept = Mapping[str, Precision]
"""product → the precision that keeps its codes"""
NOT_APART: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductChoice:
    """activations: auto, bf16, f32, int8 or fp8; of a product that is not quantised bf16, as its target takes it, or
    f32."""

    precision: Precision
    activations: str


def choose_main(config: BuildConfig, graph: Graph, target: Target, kept: Kept, notes: list[str]) -> Precision:
    """auto: w8 where the checkpoint is quantised, or what keeps the codes of more of its weights; else what most of its
    weights are stored in. Where the target has no product of that type, bf16, else f32."""
    if config.precision != "auto":
        precision = Precision.parse(config.precision)
        _require_products(precision, target)
        return precision
    stored: Counter[DType] = Counter()
    for node in graph.nodes:
        if is_product(node) or reads_table(node):
            for dtype, nbytes in stored_dtypes(product_weight(node)):
                stored[dtype] += nbytes
    most = DType.W8 if DType.W8 in stored else stored.most_common(1)[0][0]
    offered = _offered(target)
    chosen = next((dtype for dtype in (most, DType.BF16) if dtype.value in offered), DType.F32)
    why = "" if most is chosen else f"; {target.name} computes no {most.value}"
    if chosen is DType.W8:
        return _most_kept(graph, target, kept, notes)
    found = "the checkpoint is quantised" if most.is_quantised else f"most weights are stored in {most.value}"
    notes.append(f"chose --precision {chosen.value}: {found}{why}")
    return Precision(dtype=chosen)


def _require_products(precision: Precision, target: Target) -> None:
    """Nothing is said of a target without kernels: others say why it has none."""
    weights = {each.removesuffix("a8") for each in _offered(target)}  # w8a8: of w8 weights with int8 inputs
    if weights and precision.dtype.value not in weights:
        raise NoKernelError(
            f"target {target.name} cannot compute with {precision} weights",
            expected="one of " + ", ".join(each for each in PRECISIONS if Precision.parse(each).dtype.value in weights),
            got=f"--precision {precision}",
            hint="give another --precision or --target",
        )


def kept_products(config: BuildConfig, graph: Graph, target: Target, *, units: int) -> Kept:
    """With `auto`, the products whose codes the target can keep. units: as `kept_precision`."""
    if config.precision != "auto":
        return {}
    found = {node.name: kept_precision(product_weight(node), units=units) for node in products_of(graph)}
    if config.screen_lm_head or config.lm_head_precision is not None:
        found.pop(LM_HEAD, None)
    return {name: each for name, each in found.items() if each is not None and keeps(config, target, each)}


def keeps(config: BuildConfig, target: Target, precision: Precision) -> bool:
    """Whether `auto` takes this precision for the codes of a product."""
    if config.activations == "int8" and not _rounds_inputs(precision):  # other formats keep fewer bits of the source
        return False
    return precision.dtype.value in _offered(target)


def may_rearrange(config: BuildConfig, target: Target) -> Callable[[str], bool]:
    """Whether a product, by its name, may be taken apart or get its columns in another order to keep its codes: not
    where a recipe says its precision."""
    kernels = {name.split(".")[0] for name in target.kernels()}
    if config.precision != "auto" or not kernels >= {GATHER.name, JOIN.name}:
        return lambda name: False
    patterns = [rule.pattern for rule in config.layers if rule.precision is not None]
    head = config.screen_lm_head or config.lm_head_precision is not None
    return lambda name: not ((name == LM_HEAD and head) or any(fnmatch.fnmatch(name, pattern) for pattern in patterns))


def _offered(target: Target) -> set[str]:
    """Types of weights that it multiplies with."""
    return {name.split(".")[1] for name in target.kernels() if name.startswith("matmul.")}


def _most_kept(graph: Graph, target: Target, kept: Kept, notes: list[str]) -> Precision:
    """The precision that most values of a quantised checkpoint's products get."""
    values: Counter[Precision] = Counter()
    products = [node for node in products_of(graph) if not _steers(node)]
    for node in products:
        values[kept.get(node.name, Precision(dtype=DType.W8))] += math.prod(weight_shape(product_weight(node)))
    ((most, _),) = values.most_common(1)
    count = sum(node.name in kept or held_by_w8(product_weight(node)) for node in products)
    found = f"{count} of {len(products)} matmuls keep their codes" if count else "no matmul can keep its codes"
    lacking = sorted({Precision.parse(each).dtype.value for each in KEPT} - _offered(target))
    why = f"; {target.name} computes no {', '.join(lacking)}" if lacking else ""
    notes.append(f"chose --precision {most}: the checkpoint is quantised; {found}{why}")
    return most


def product_weight(node: gs.Node) -> gs.Tensor:
    """The matrix of a product [N, K], of all its experts [experts, N, K], or of a table."""
    packed = next((op.packed for op in specs(node) if op.packed is not None), None)
    return node.inputs[1 if packed is None else packed]  # a table is behind the token ids


def table_dtype(main: Precision) -> DType:
    """Type of token and position tables: rows of w8 in every quantised engine."""
    return DType(TABLE_FORMAT.dtype) if main.dtype.is_quantised else main.dtype


def choose_unquantised(config: BuildConfig, main: Precision, graph: Graph) -> dict[str, ProductChoice]:
    """Choice by product that is never quantised: routers, gates of shared experts, what says how much of a state
    stays, how much is added, or how much streams take of each other, and the products of heads with latents. They have
    few weights. An error in them may choose other experts, or changes every later token."""
    activations = "f32" if config.activations == "f32" else "bf16"
    return {
        node.name: ProductChoice(
            precision=_unquantised(node) if main.dtype.is_quantised else main, activations=activations
        )
        for node in products_of(graph)
        if _steers(node)
    }


def _steers(node: gs.Node) -> bool:
    """Whether a product makes an input that decides (`Op.decisive`), such as the logits of experts or the steps of a
    recurrence, maybe by a further product; or what heads read of latents."""
    made = node.outputs[0]
    return is_of_heads(node) or any(
        decides(each, user) or (is_matmul(user) and _steers(user))
        for each in (made, *(user.outputs[0] for user in made.outputs if is_monotone(user)))
        for user in each.outputs
    )


def products_of(graph: Graph) -> list[gs.Node]:
    """In the order of the graph."""
    return [node for node in graph.nodes if is_product(node)]


def _unquantised(node: gs.Node) -> Precision:
    """bf16 where the weight is stored so, else f32, which holds every other value too."""
    stored = {dtype for dtype, _ in stored_dtypes(product_weight(node))}
    return Precision(dtype=DType.BF16 if stored == {DType.BF16} else DType.F32)


def choose_products(
    config: BuildConfig, main: Precision, kept: Kept, products: Sequence[str], wholes: Mapping[str, str] = NOT_APART
) -> dict[str, ProductChoice]:
    """Choice by product. wholes: what products are parts of, whose names patterns may fit too.

    Raises UsageError for a pattern that fits none, and for int8 where nothing is quantised.
    """
    others = Precision(dtype=DType.W8) if kept else main
    precisions = {name: kept.get(name, others) for name in products}
    if LM_HEAD in precisions and LM_HEAD not in kept:
        precisions[LM_HEAD] = _head(config, main)
    activations = dict.fromkeys(products, config.activations)
    for rule in config.layers:
        found = rule.fitting(list(dict.fromkeys((*products, *wholes.values()))))
        fitting = [name for name in products if name in found or wholes.get(name) in found]
        for name in fitting:
            if rule.precision is not None:
                precisions[name] = Precision.parse(rule.precision)
            if rule.activations is not None:
                activations[name] = rule.activations
        if rule.activations == "int8":
            _require_quantised([name for name in fitting if not _rounds_inputs(precisions[name])], rule.pattern)
        if rule.activations == "fp8":
            _require_fp8([precisions[name] for name in fitting], rule.pattern)
    if config.activations == "int8" and not any(map(_rounds_inputs, precisions.values())):
        _require_quantised([str(main)], "the whole model")
    if config.activations == "fp8":
        of_fp8 = [each for each in precisions.values() if each.dtype is DType.F8]
        _require_fp8(of_fp8 or [main], "the whole model")
    return {
        name: ProductChoice(precision=each, activations=_possible(activations[name], each))
        for name, each in precisions.items()
    }


def _possible(activations: str, precision: Precision) -> str:
    if activations == "fp8":
        return "fp8" if precision.dtype is DType.F8 else "bf16"
    return activations if _rounds_inputs(precision) or activations == "f32" else "bf16"


def _rounds_inputs(precision: Precision) -> bool:
    quantised = precision.dtype.weight_format
    return quantised is not None and quantised.rounds_inputs


def _head(config: BuildConfig, main: Precision) -> Precision:
    if config.lm_head_precision is not None:
        return Precision.parse(config.lm_head_precision)
    quantised = main.dtype.weight_format
    return main if quantised is None else Precision.parse(quantised.lm_head)


def _require_quantised(others: list[str], where: str) -> None:
    if others:
        raise UsageError(
            "int8 activations are not supported for float weights",
            where=where,
            expected=f"{', '.join(QUANTISED[:-1])} or {QUANTISED[-1]}",
            got=", ".join(others[:4]),
            hint="give --precision w8, or --activations auto",
        )


def _require_fp8(precisions: list[Precision], where: str) -> None:
    others = [str(each) for each in precisions if each.dtype is not DType.F8 or each.group not in INPUT_GROUPS]
    if others:
        raise UsageError(
            "FP8 activations are supported only with FP8 weights that have a scale for each row or each 128 columns",
            where=where,
            expected="f8 or f8g128, as --precision auto keeps them from a checkpoint in FP8",
            got=", ".join(dict.fromkeys(others)),
            hint="give --activations auto",
        )
