"""A Checkpoint as a float plan for a calibration text: all windows at once, each a sequence in a block of its own."""

import dataclasses
from collections.abc import Sequence

from ingot.builder.calibrated.text import WINDOW, windows_of
from ingot.builder.float_plan import FloatModel, lower_float
from ingot.builder.graph import Graph
from ingot.builder.names import name_nodes
from ingot.builder.pipeline import require_plugins, run_passes, structure_passes
from ingot.builder.precision import choose_unquantised
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType, Precision
from ingot.plan import Limits, Plan, Step
from ingot.plugins.registry import find_op


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextModel:
    """windows: token ids, at most WINDOW each. steering: names of products that are never quantised."""

    model: FloatModel
    plan: Plan
    windows: list[list[int]]
    steering: frozenset[str]

    @classmethod
    def open(cls, checkpoint: Checkpoint, texts: Sequence[str], count: int) -> "TextModel":
        """count: tokens of the texts, at most. Raises UsageError where the texts do not fit the model."""
        graph = Graph.load(checkpoint.graph_path)
        require_plugins(graph, run_passes(graph, structure_passes()))
        name_nodes(graph)
        steering = choose_unquantised(BuildConfig(), Precision(dtype=DType.F32), graph)
        model = lower_float(graph, checkpoint)
        windows = windows_of(checkpoint, texts, model.shape.vocab_size, model.shape.positions, count)
        tokens = sum(map(len, windows))
        limits = Limits(
            max_batch_size=len(windows),
            max_input_len=WINDOW,
            max_seq_len=WINDOW + 1,
            max_num_tokens=tokens,
            max_logit_rows=tokens,
        )
        return cls(model=model, plan=model.plan(limits, WINDOW), windows=windows, steering=frozenset(steering))

    def products(self) -> list[Step]:
        """Steps that multiply with a weight, in the order of the plan; routers are none."""
        return [step for step in self.plan.steps if (op := find_op(step.op)).is_matmul or op.experts]
