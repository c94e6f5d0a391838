"""A graph of plugins lowered in float32 for `ref`: the model itself, whatever an engine of it rounds."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ingot.builder.expressions import check_sources
from ingot.builder.graph import Graph
from ingot.builder.lower import Lowering, ModelShape, cache_groups, read_shape
from ingot.builder.passes.split_ranks import SplitRanks, own_heads
from ingot.builder.passes.split_sums import split_passes
from ingot.builder.pipeline import StepPass, run_passes, run_step_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.builder.program import Program
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType, Precision
from ingot.plan import Limits, Plan
from ingot.plugins.registry import find_target


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FloatModel:
    """lowering: names the weights; program: the steps."""

    lowering: Lowering
    program: Program
    shape: ModelShape

    def plan(self, limits: Limits, tokens_per_block: int) -> Plan:
        """The plan under these limits."""
        caches = cache_groups(self.shape, limits, tokens_per_block, DType.F32, frees_windows=True)
        return self.lowering.plan(self.program, limits, caches, self.shape)


def lower_float(
    graph: Graph,
    checkpoint: Checkpoint,
    passes: Sequence[StepPass] = (),
    sum_parts: int = 1,
    share: tuple[int, int] = (0, 1),
    groups: Mapping[str, int] = MappingProxyType({}),
) -> FloatModel:
    """Rewrites `graph`, whose nodes have their names. sum_parts: as of a BuildConfig; share: of a rank, its number and
    how many there are; groups: of an engine with the same parts, as `groups_of_parts` says. Raises CheckpointError for
    a weight that is not there, BuildError for a share that no rank can have."""
    choice = ProductChoice(precision=Precision(dtype=DType.F32), activations="bf16")
    products = {node.name: choice for node in products_of(graph)}
    ref = find_target("ref")
    run_passes(graph, target_passes(ref, products=products, tables=DType.F32, kv=DType.F32))
    lowering = Lowering(graph)
    for use in lowering.uses:
        check_sources(use.tensor, checkpoint)
    sums = split_passes(lowering, ref, sum_parts, *share, groups)
    ranks = tuple(SplitRanks(sums=each) for each in sums if share[1] > 1)
    program = run_step_passes(lowering.program, (*sums, *ranks, *passes))
    return FloatModel(lowering=lowering, program=program, shape=own_heads(read_shape(graph), ranks))
