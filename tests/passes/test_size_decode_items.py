"""How many new tokens of a sequence attention's kernels for decode take, and what of it a session refuses."""

import dataclasses

import numpy as np
import pytest

from ingot.builder.passes.size_decode_items import SizeDecodeItems
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plugins.cuda.plan_facts import specialisation, tiles_of
from ingot.plugins.cuda.shapes import Tiles, split_rules
from tests.plugins.cpu.one_step import one_step_plan, plain_batch
from tests.plugins.cuda.one_step import layout_of


def attention(heads: int, kv_heads: int, op: str = "paged_attention") -> Draft:
    """A step that attends."""
    attrs = {"heads": heads, "kv_heads": kv_heads}
    return Draft(name=f"{op}{heads}/{kv_heads}", op=op, kernel="", inputs=(), outputs=(), attrs=attrs)


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [
        ([attention(32, 32)], 16),
        ([attention(32, 8)], 4),
        ([attention(9, 3)], 5),
        ([attention(16, 1)], 1),
        ([attention(17, 1)], 0),
        ([attention(8, 4), attention(8, 1), attention(8, 8)], 2),  # the fewest of all layers
        ([attention(128, 1, "latent_attention")], 1),  # whatever the number of heads
        ([], 0),
    ],
)
def test_as_many_as_fill_a_tile(steps: list[Draft], tokens: int) -> None:
    made, report = SizeDecodeItems(rules=split_rules(132))(Program(steps=tuple(steps), values=(), logits=None))
    assert (made.decode_tokens, report.name, report.fired) == (tokens, "size_decode_items", len(steps))


def test_a_session_takes_what_the_plan_says_if_it_fits_a_tile() -> None:
    """As a rank with few of the query heads of its KV heads."""
    attrs = {"layer": 0, "heads": 4, "kv_heads": 2, "head_dim": 16, "window": 0, "scale": 0.25, "softcap": 0.0}
    attrs |= {"bf16_bias": 0, "growth": 0.0, "growth_every": 1}
    inputs = [np.zeros((1, 64), np.float32), None, None]
    kv = layout_of(DType.BF16, kv_heads=2)
    plan, _ = one_step_plan("paged_attention.bf16.sm80", inputs, attrs, plain_batch(1), kv)
    for tokens in (0, 1, 8):
        made = dataclasses.replace(plan, decode_tokens=tokens)
        assert tiles_of(made) == Tiles(decode=tokens, prefill=64)
        assert specialisation(made).head_dim == 16
    with pytest.raises(EngineError, match=r"decode_tokens(.|\n)*at most 8, with 2 query heads(.|\n)*got: 9"):
        specialisation(dataclasses.replace(plan, decode_tokens=9))
    latents = dataclasses.replace(kv, kv_heads=1, head_dim=48, latent=32)
    with pytest.raises(EngineError, match=r"decode_tokens(.|\n)*at most 1(.|\n)*got: 2"):
        specialisation(dataclasses.replace(plan, caches=(latents,), decode_tokens=2))
