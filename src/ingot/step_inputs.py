"""The inputs of a step by name: what a session takes from a batch and gives to the steps of its plan that read it.

    T = 7 tokens of S = 3 sequences        input_ids        [T]
    ┌─────────────────────┬───┬───┐        positions        [T]      past_lengths[s] + place in the sequence's tokens
    │ A                   │ B │ C │        token_sequences  [T]      0 0 0 0 0 1 2
    └─────────────────────┴───┴───┘        query_starts     [S + 1]  0 5 6 7
                                           past_lengths     [S]      tokens that are in the KV cache before the step
                                           block_tables     [G, S, W] blocks of each sequence, in each cache group
                                           logit_rows       [R]      tokens whose logits are wanted
                                           whole_rows       [R]      0 where the best token is all that is wanted, so
                                                                     that other logits may be -inf; else 1

A plan lists those that its steps read. What a later version adds (an adapter for each sequence, a tree parent for each
token) is a line here, and a session that has not heard of it refuses the plan.
"""

from collections.abc import Collection

import numpy as np

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Extent, Input, Plan
from ingot.step_io import Int32, StepBatch

STEP_INPUTS = tuple(
    Input(name=name, dtype=DType.I32, extent=extent)
    for name, extent in (
        ("input_ids", Extent.TOKENS),
        ("positions", Extent.TOKENS),
        ("token_sequences", Extent.TOKENS),
        ("query_starts", Extent.BOUNDS),
        ("past_lengths", Extent.SEQUENCES),
        ("block_tables", Extent.BLOCKS),
        ("logit_rows", Extent.LOGITS),
        ("whole_rows", Extent.LOGITS),
    )
)


def inputs_among(names: Collection[str]) -> tuple[Input, ...]:
    """Those of the inputs that have these names."""
    return tuple(each for each in STEP_INPUTS if each.name in names)


def step_arrays(batch: StepBatch) -> dict[str, Int32]:
    """Every input of one step, by name."""
    new = np.diff(batch.query_starts)
    sequences = np.repeat(np.arange(len(new), dtype=np.int32), new)
    places = np.arange(len(batch.ids), dtype=np.int32) - batch.query_starts[sequences]
    return {
        "input_ids": batch.ids,
        "positions": batch.past_lengths[sequences] + places,
        "token_sequences": sequences,
        "query_starts": batch.query_starts,
        "past_lengths": batch.past_lengths,
        "block_tables": batch.block_tables,
        "logit_rows": batch.logit_rows,
        "whole_rows": np.ones(len(batch.logit_rows), np.int32),  # a session may know of rows where 0 will do
    }


def require_known_inputs(plan: Plan) -> None:
    """Raise EngineError for a plan that asks for what sessions of this version do not give."""
    known = {each.name: each for each in STEP_INPUTS}
    for each in plan.inputs:
        if known.get(each.name) != each:
            raise EngineError(
                "the plan asks for an input that this version of ingot does not give",
                where=f"inputs.{each.name}",
                expected=", ".join(map(str, STEP_INPUTS)),
                got=str(each),
                hint="run the engine with the version of ingot that built it, or build it again with this one",
            )
