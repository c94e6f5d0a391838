"""Tables of a prompt's tokens are made where somebody asks for them."""

import numpy as np
import pytest

from ingot.runtime.logprobs import Logprob, PromptTables
from ingot.runtime.request import TokenProbs

TABLES = PromptTables(
    [
        TokenProbs(
            token=token,
            log_prob=-1.0,
            rank=2,
            top_ids=np.array([9], np.int32),
            top_log_probs=np.array([-0.5], np.float32),
        )
        for token in (4, 5)
    ],
    str,
)


def test_places_are_those_of_a_list() -> None:
    first, second = ({token: Logprob(-1.0, 2, str(token)), 9: Logprob(-0.5, 1, "9")} for token in (4, 5))
    expected = [None, first, second]
    assert list(TABLES) == expected
    assert len(TABLES) == 3
    for place in range(-3, 3):
        assert TABLES[place] == expected[place]
    assert TABLES[1:] == expected[1:]
    assert TABLES[::-1] == expected[::-1]
    for place in (-4, 3):
        with pytest.raises(IndexError):
            TABLES[place]
