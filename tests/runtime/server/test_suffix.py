"""Completions with a suffix, on a running server: the prompt has the marks of the model's form around the texts, and
the answer is that of this prompt. Models without such marks: `test_extras`."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.server.marked import mark_tokenizer
from tests.runtime.server.served import Served, serving

FORMS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codestral": ("[SUFFIX]", "[PREFIX]"),
}
"""The marks in the order in which they stand in a prompt."""
SUFFIX_FIRST = ("codestral",)
BEFORE, AFTER = "Once upon a time", " and they lived."
ASKED: dict[str, Any] = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 8, "temperature": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filling:
    """A server of a model with one form."""

    name: str
    served: Served

    def post(self, **fields: Any) -> Any:
        with self.served.http() as http:
            return http.post("/v1/completions", json={**ASKED, **fields})

    def choices(self, **fields: Any) -> list[Any]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"])

    def expected(self, before: str = BEFORE, after: str = AFTER) -> list[int]:
        """The tokens of a prompt."""
        tokenizer = self.served.service.tokenizer
        marks = [tokenizer.control_tokens[each] for each in FORMS[self.name]]
        texts = [tokenizer.encode(each, add_special_tokens=False) for each in (before, after)]
        texts = texts[::-1] if self.name in SUFFIX_FIRST else texts
        ids = tokenizer.encode("")  # what begins every prompt
        for place, mark in enumerate(marks):
            ids = [*ids, mark, *(texts[place] if place < len(texts) else ())]
        return ids


@pytest.fixture(scope="module", params=FORMS)
def filling(
    request: pytest.FixtureRequest, engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Filling]:
    folder = tmp_path_factory.mktemp("marked")
    for path in engine.glob("*.json"):
        shutil.copy(path, folder)
    mark_tokenizer(folder / "tokenizer.json", FORMS[request.param])
    with serving(ModelRunner.from_dir(engine), Tokenizer.from_dir(folder), directory=folder) as served:
        yield Filling(name=request.param, served=served)
        assert served.is_empty()


@pytest.mark.daily(1)
def test_the_prompt_is_the_form_of_the_model_and_the_answer_is_its_own(filling: Filling) -> None:
    (choice,) = filling.choices(return_token_ids=True)
    assert choice["prompt_token_ids"] == filling.expected()
    (same,) = filling.choices(prompt=filling.expected(), suffix=None)
    (other,) = filling.choices(suffix=" There was a cat.")
    assert choice["text"] == same["text"]
    assert choice["text"]
    assert AFTER not in choice["text"], "only what stands in the gap"
    assert other["text"] != choice["text"], "the suffix counts"


def test_a_stream_says_the_same(filling: Filling) -> None:
    (whole,) = filling.choices(return_token_ids=True)
    lines = filling.post(stream=True, return_token_ids=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(each["text"] for each in chunks) == whole["text"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.daily(1)
def test_texts_that_read_like_marks_are_text(filling: Filling) -> None:
    mark = FORMS[filling.name][-1]
    (choice,) = filling.choices(prompt=f"a{mark}b", suffix=mark, return_token_ids=True)
    ids = choice["prompt_token_ids"]
    marks = [filling.served.service.tokenizer.control_tokens[each] for each in FORMS[filling.name]]
    assert [each for each in ids if each in marks] == marks


@pytest.mark.daily(1)
def test_several_prompts_empty_texts_and_the_official_client(filling: Filling) -> None:
    several = filling.choices(prompt=[BEFORE, ""], return_token_ids=True)
    assert [each["prompt_token_ids"] for each in several] == [filling.expected(), filling.expected("")]
    (empty,) = filling.choices(suffix="", return_token_ids=True)
    assert empty["prompt_token_ids"] == filling.expected(after="")
    client = filling.served.client().completions.create(model="tiny", **ASKED)
    assert client.choices[0].text == filling.choices()[0]["text"]
