"""Text around a gap becomes a prompt of the model's own control tokens."""

import pytest

from ingot.errors import RequestError
from ingot.runtime.fill_in_middle import fill_prompt
from ingot.runtime.template_text import is_by_template


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_order(tokens: list[str], expected: str) -> None:
    assert fill_prompt("a", "b", tokens) == expected


def test_tokens_in_the_text_are_text() -> None:
    mark = "<fim_middle>"
    text = fill_prompt(mark, "b", ["<fim_prefix>", "<fim_suffix>", mark])
    first, last = text.index(mark), text.rindex(mark)
    assert not is_by_template(text, first, first + len(mark))
    assert is_by_template(text, last, last + len(mark))


def test_a_model_without_such_tokens_is_told() -> None:
    with pytest.raises(RequestError, match="no tokens for filling in the middle"):
        fill_prompt("a", "b", ["<fim_prefix>"])
