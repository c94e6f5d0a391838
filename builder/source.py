"""A Checkpoint as `verify` sees it: the steps that an engine of it has, the weights of those steps, and the graph.

Nothing here depends on an engine's bytes or precision: steps and weights come from the same passes with float32
everywhere, the values of the graph from the graph before any pass (`builder/evaluate.py`). An engine's target decides
which step passes there are: whether its products add the residual stream.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ingot.builder.build import graph_errors
from ingot.builder.evaluate import Evaluation
from ingot.builder.expressions import Float32, WeightReader, key, leaves
from ingot.builder.float_plan import lower_float
from ingot.builder.graph import Graph, is_op
from ingot.builder.names import name_nodes
from ingot.builder.pack import WeightUse
from ingot.builder.passes.keep_codes import KeepCodes, rearranged
from ingot.builder.passes.split_sums import groups_of_parts
from ingot.builder.pipeline import require_plugins, run_passes, step_passes, structure_passes
from ingot.checkpoint import Checkpoint
from ingot.plan import Plan
from ingot.plugins.target import Target

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """plan: in float32, with names, wiring and attributes that engines of this Checkpoint for such targets share.

    tensors   step → name in the graph of each of its outputs; "" where the graph has no such tensor
    attended  output of an attention in the graph → names of its keys and values, as a KV cache holds them
    hashes    file → SHA-256 of what the Checkpoint was converted from
    same      weight → the first one that is the same in the Checkpoint: where products are not packed, a tied embedding
              and its lm_head are one
    """

    plan: Plan
    tensors: Mapping[str, tuple[str, ...]]
    attended: Mapping[str, tuple[str, str]]
    hashes: Mapping[str, str]
    same: Mapping[str, str]
    logits: str
    _uses: Mapping[str, WeightUse]
    _reader: WeightReader
    _graph: Path

    def rows(self, weight: str, begin: int, end: int) -> Float32:
        """Rows [begin, end) of a weight of the plan, as the Checkpoint has them; a vector is one column."""
        return self._reader.read_rows(self._uses[weight].tensor, begin, end)

    def evaluate(
        self,
        ids: Int64,
        wanted: Collection[str],
        threads: int,
        experts: Mapping[str, Int64] = MappingProxyType({}),
        quantised: Collection[str] = (),
    ) -> Evaluation:
        """The graph's own values for ids [batch, sequence]; experts: as in `Evaluation`; quantised: weights that are in
        the engine; those that it has beside the source's are made of these."""
        own = (self._uses[weight] for weight in quantised if weight in self._uses)
        by_rows = {name for use in own for name in leaves(use.tensor)}
        return Evaluation(Graph.load(self._graph), self._reader, ids, wanted, threads, experts, by_rows)


def _attended(graph: Graph) -> dict[str, tuple[str, str]]:
    """Keys and values by the attention's own output, and by what that becomes when its heads are merged."""
    found = {}
    for node in graph.nodes:
        if not is_op(node, "Attention"):
            continue
        tensor, keys_values = node.outputs[0], (node.inputs[1].name, node.inputs[2].name)
        found[tensor.name] = keys_values
        while len(tensor.outputs) == 1 and tensor.outputs[0].op in ("Transpose", "Reshape"):
            tensor = tensor.outputs[0].outputs[0]
            found[tensor.name] = keys_values
    return found


@contextlib.contextmanager
def open_source(directory: Path, made: Plan, target: Target, share: tuple[int, int] = (0, 1)) -> Iterator[Source]:
    """made, target: of the engine; share: of the rank that has this plan, its number among those that divide each layer
    and how many they are. Raises CheckpointError, PassError or BuildError where `build` would."""
    checkpoint = Checkpoint.open(directory)
    with graph_errors(checkpoint.graph_path):
        graph = Graph.load(checkpoint.graph_path)
        names, logits, attended = set(graph.surgeon.tensors()), graph.logits.name, _attended(graph)
        require_plugins(graph, run_passes(graph, structure_passes()))
        name_nodes(graph)
        if apart := rearranged(made):
            units = made.sum_parts if any(weight.dtype.has_units for weight in made.weights) else 0
            _keep_codes(graph, checkpoint, apart, units=units, alike=made.sum_parts > 1)
        model = lower_float(graph, checkpoint, step_passes(target), made.sum_parts, share, groups_of_parts(made))
        plan, uses = model.plan(made.limits, made.tokens_per_block), model.lowering.uses
    written = model.program.tensors()
    tensors = {step: tuple(name if name in names else "" for name in outputs) for step, outputs in written.items()}
    first: dict[tuple[object, ...], str] = {}
    same = {use.name: first.setdefault(key(use.tensor), use.name) for use in uses}
    with WeightReader(checkpoint) as reader:
        yield Source(
            plan=plan,
            tensors=tensors,
            attended=attended,
            hashes=checkpoint.config.sources,
            same=same,
            logits=logits,
            _uses={use.name: use for use in uses},
            _reader=reader,
            _graph=checkpoint.graph_path,
        )


def _keep_codes(graph: Graph, checkpoint: Checkpoint, apart: Mapping[str, bool], *, units: int, alike: bool) -> None:
    """The products that the engine has apart, or in another order of columns, are so here too."""
    with WeightReader(checkpoint) as reader:
        keep = KeepCodes(
            reader=reader,
            wanted=lambda name: name in apart,
            takes=lambda precision: True,
            ordered=lambda node: apart[node.name],
            units=units,
            alike=alike,
        )
        run_passes(graph, (keep,))
