"""What the manifest says for people: the model card, and what weights were in their source."""

import math
import re
from collections.abc import Iterator, Sequence

from ingot.builder.expressions import leaves
from ingot.builder.pack import WeightUse
from ingot.checkpoint import Checkpoint
from ingot.manifest import Fact
from ingot.plan import Plan
from ingot.plugins.registry import find_op


def model_card(checkpoint: Checkpoint, plan: Plan) -> dict[str, Fact]:
    """Plain values; nothing is computed from them later."""
    attention = next(step for step in plan.steps if find_op(step.op).reads_kv)
    embedding = next(step for step in plan.steps if find_op(step.op).tables)
    shapes = {weight.name: weight.shape for weight in plan.weights}
    used = {name for step in plan.steps for name in step.inputs}  # machine code is none
    model, formats = checkpoint.config.model, checkpoint.config.source_formats
    return {
        "model_type": None if model is None else model.family,
        **({"quantised_source": ", ".join(formats)} if formats else {}),
        "layers": len({step.name.split("/")[0] for step in plan.steps if step.name.startswith("layers.")}),
        "hidden_size": shapes[embedding.inputs[0]][1],
        "heads": attention.attrs["heads"],
        "kv_heads": attention.attrs["kv_heads"],
        "head_dim": attention.attrs["head_dim"],
        "kv_cache_dtype": plan.caches[0].dtype.value,
        "vocab_size": plan.vocab_size,
        "positions": plan.max_positions,
        **_expert_card(plan),
        "packed_parameters": sum(math.prod(shape) for name, shape in shapes.items() if name in used),
    }


def layout_card(plan: Plan, ranks: int) -> dict[str, Fact]:
    """How ranks divide the model, where there are pipeline stages."""
    _, stages = plan.stage
    return {"pp_size": stages, "tp_size": ranks // stages} if stages > 1 else {}


def _expert_card(plan: Plan) -> dict[str, Fact]:
    """What is said of a mixture of experts."""
    experts = next((step for step in plan.steps if find_op(step.op).experts), None)
    if experts is None:
        return {}
    packed = find_op(experts.op).packed
    assert packed is not None, "experts have weights"
    (stack,) = (weight.shape[0] for weight in plan.weights if weight.name == experts.inputs[packed])
    slots = next(buffer.cols for buffer in plan.buffers if buffer.name == experts.inputs[1])
    return {"experts": stack, "experts_per_token": slots}


def weight_sources(uses: Sequence[WeightUse], checkpoint: Checkpoint) -> dict[str, str]:
    """Weight → the formats that its parts have in the Checkpoint, of those that are quantised there."""
    kinds = checkpoint.config.quantised
    if not kinds:
        return {}
    found = {
        use.name: dict.fromkeys(_source(name, checkpoint) for name in _stored_weights(use) if name in kinds)
        for use in uses
    }
    return {name: ", ".join(each) for name, each in found.items() if each}


def _source(name: str, checkpoint: Checkpoint) -> str:
    """The format of a weight, and what ingot's own quantisation has lost."""
    loss = checkpoint.config.losses.get(name)
    return checkpoint.config.quantised[name] + ("" if loss is None else f", loss {loss:.2%}")


def _stored_weights(use: WeightUse) -> Iterator[str]:
    """Weights of the Checkpoint that it is made of: a quantised one has several initialisers, and so has each of the
    members of a stack."""
    for leaf in leaves(use.tensor):
        name = leaf.rpartition("/")[0]
        yield name
        yield re.sub(r"/\d+/weight$", "/weight", name)
