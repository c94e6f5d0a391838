"""Facts for the manifest: what people want to know of the model, and the token ids that end and pad sequences."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from ingot.checkpoint import Checkpoint
from ingot.configs.read import Section
from ingot.errors import ConfigError
from ingot.manifest import Fact
from ingot.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """eos may be several; None and () where the model does not say."""

    eos: tuple[int, ...]
    bos: int | None
    pad: int | None


def model_facts(checkpoint: Checkpoint, plan: Plan) -> dict[str, Fact]:
    """Plain values; nothing is computed from them later."""
    attention = next(step for step in plan.steps if step.op == "paged_attention")
    embedding = next(step for step in plan.steps if step.op == "embedding")
    shapes = {weight.name: weight.shape for weight in plan.weights}
    used = {name for step in plan.steps for name in step.inputs}  # machine code is none
    model = checkpoint.config.model
    return {
        "model_type": None if model is None else model.family,
        "layers": plan.kv.num_layers,
        "hidden_size": shapes[embedding.inputs[0]][1],
        "heads": attention.attrs["heads"],
        "kv_heads": plan.kv.kv_heads,
        "head_dim": plan.kv.head_dim,
        "kv_cache_dtype": plan.kv.dtype.value,
        "vocab_size": plan.vocab_size,
        "positions": plan.max_positions,
        "packed_parameters": sum(math.prod(shape) for name, shape in shapes.items() if name in used),
    }


def read_token_ids(directory: Path) -> TokenIds:
    """From generation_config.json; a directory without it has none."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return TokenIds(eos=(), bos=None, pad=None)
    section = Section.from_file(path)
    eos = section.raw("eos_token_id")
    many: list[Any] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in many):
        raise ConfigError(
            "a value is not usable", where=section.place("eos_token_id"), expected="a token id or a list of them",
            got=repr(eos)[:200],
        )  # fmt: skip
    return TokenIds(
        eos=tuple(many),
        bos=section.integer("bos_token_id") if section.has("bos_token_id") else None,
        pad=section.integer("pad_token_id") if section.has("pad_token_id") else None,
    )
