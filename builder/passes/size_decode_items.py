"""How many new tokens of a sequence attention's kernels for decode take: as many as fill a tile with their query heads.

    4 query heads of a KV head    up to 4 new tokens    32 query heads    none: kernels for prompts take all

It runs before the heads are divided among ranks and the layers among pipeline stages, since the kernels for decode and
for prompts give different bits: all ranks of an engine, and an engine of one rank, take the same.
"""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.plugins.ops import latent_attention
from ingot.plugins.registry import find_op
from ingot.plugins.split_rules import SplitRules

NAME = "size_decode_items"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SizeDecodeItems:
    """One number for all layers: an item of a step is the same in each."""

    rules: SplitRules

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """fired: attention calls."""
        attention = [step for step in program.steps if find_op(step.op).reads_kv]
        found = min(map(self._tokens, attention), default=0)
        return dataclasses.replace(program, decode_tokens=found), PassReport(name=NAME, fired=len(attention))

    def _tokens(self, attention: Draft) -> int:
        if attention.op == latent_attention.OP.name:
            return 1
        return self.rules.group * int(attention.attrs["kv_heads"]) // int(attention.attrs["heads"])
