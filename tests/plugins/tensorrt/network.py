"""Lowered networks run in numpy: ONNX's reference evaluator, and for the attention nodes a function that is given."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ingot.builder.plan_targets import plan_targets
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.plan import Plan
from ingot.plugins.op import Call, KvCache
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.ops import paged_attention, rope_kv_write, rope_table
from ingot.plugins.registry import find_targets
from ingot.plugins.tensorrt.attention import DOMAIN, PLUGIN, Attention, plugin_inputs
from ingot.step_io import StepBatch
from tests.plugins.ops.calls import with_arrays

Array = npt.NDArray[Any]
Attend = Callable[[Attention, Sequence[Array]], tuple[Array, Array, Array]]
"""(attributes, inputs of the node) → y, keys, values"""


def decided(config: BuildConfig, checkpoint: Path) -> tuple[OpGraph, Plan]:
    """What a build gives to the compiler of its target."""
    (job,) = plan_targets(
        config, Checkpoint.open(checkpoint), find_targets(config.target), lambda what, done, total: None
    )
    assert job.graph is not None, "the target compiles the graph"
    return job.graph, job.plan


def evaluator(model: onnx.ModelProto, attend: Attend) -> ReferenceEvaluator:
    """Runs a lowered network."""

    class Attends(OpRun):
        op_domain = DOMAIN

        def _run(self, *inputs: Array, **attributes: Any) -> tuple[Array, Array, Array]:
            return attend(Attention(**attributes), inputs)

    Attends.__name__ = PLUGIN
    return ReferenceEvaluator(model, new_ops=[Attends])


class NumpyAttention:
    """The attention of a step by the references of its two ops, on a cache of its own."""

    def __init__(self, plan: Plan, num_blocks: int) -> None:
        self.cache = KvCache(plan.caches[0], num_blocks)
        self.batch: StepBatch | None = None

    def __call__(self, attention: Attention, inputs: Sequence[Array]) -> tuple[Array, Array, Array]:
        assert self.batch is not None
        given = dict(zip(plugin_inputs(attention), inputs, strict=True))
        usual = {"value_norm": 0, "keys_as_values": 0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1}
        attrs = {**usual, **attention.attributes()}
        cos_sin = None
        if attention.rotary:
            scale = {"scale": attention.rope_scale}
            read = with_arrays(rope_table.OP, [given["inv_freq"]], self.batch)
            table = Call(inputs=read, attrs=scale, batch=self.batch, kv=[self.cache])
            (cos_sin,) = rope_table.OP.reference(table)
        write = Call(
            inputs=with_arrays(
                rope_kv_write.OP, [given["qkv"], cos_sin, given.get("q_norm"), given.get("k_norm")], self.batch
            ),
            attrs=attrs,
            batch=self.batch,
            kv=[self.cache],
        )
        (queries,) = rope_kv_write.OP.reference(write)
        read = with_arrays(paged_attention.OP, [queries], self.batch)
        attend = Call(inputs=read, attrs=attrs, batch=self.batch, kv=[self.cache])
        (y,) = paged_attention.OP.reference(attend)
        return y.astype(given["keys"].dtype if attention.narrow else np.float32), given["keys"], given["values"]
