"""Rules of draws, written as one would say them."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.step_io import DrawRules

Rule = tuple[Mapping[int, float], Sequence[int], Sequence[int], tuple[float, float, float], float]
"""(biases, prompt, output, (repetition, frequency, presence), min_p) of one draw"""


def make_rules(rules: Sequence[Rule]) -> DrawRules:
    """One draw each."""

    def column(values: Sequence[float]) -> npt.NDArray[np.float32]:
        return np.array(values, np.float32)

    def starts(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.cumsum([0, *lengths]).astype(np.int32)

    return DrawRules(
        min_p=column([rule[4] for rule in rules]),
        repetition_penalty=column([rule[3][0] for rule in rules]),
        frequency_penalty=column([rule[3][1] for rule in rules]),
        presence_penalty=column([rule[3][2] for rule in rules]),
        history_starts=starts([len(rule[1]) + len(rule[2]) for rule in rules]),
        history=np.array([token for rule in rules for token in (*rule[1], *rule[2])], np.int32),
        num_prompt=np.array([len(rule[1]) for rule in rules], np.int32),
        bias_starts=starts([len(rule[0]) for rule in rules]),
        bias_ids=np.array([token for rule in rules for token in rule[0]], np.int32),
        bias=column([value for rule in rules for value in rule[0].values()]),
    )
