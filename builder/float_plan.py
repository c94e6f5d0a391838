"""A graph of plugins lowered in float32 for `ref`: the model itself, whatever an engine of it rounds."""

from ingot.builder.expressions import check_sources
from ingot.builder.graph import Graph
from ingot.builder.lower import Lowering, ModelShape, cache_groups, read_shape
from ingot.builder.pipeline import run_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType, Precision
from ingot.plan import Limits, Plan
from ingot.plugins.registry import find_target


def lower_float(graph: Graph, checkpoint: Checkpoint, *, adding_products: bool = False) -> tuple[Lowering, ModelShape]:
    """Rewrites `graph`, whose nodes have their names. Raises CheckpointError for a weight that is not there."""
    choice = ProductChoice(precision=Precision(dtype=DType.F32), activations="bf16")
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(find_target("ref"), products=products, tables=DType.F32, kv=DType.F32))
    lowering, shape = Lowering(graph, adding_products=adding_products), read_shape(graph)
    for use in lowering.uses:
        check_sources(use.tensor, checkpoint)
    return lowering, shape


def float_plan(lowering: Lowering, shape: ModelShape, limits: Limits, tokens_per_block: int) -> Plan:
    """The plan of what `lower_float` gave."""
    caches = cache_groups(shape, limits, tokens_per_block, DType.F32, frees_windows=True)
    return lowering.plan(limits, caches, shape)
