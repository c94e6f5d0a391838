"""Reasoning over HTTP: apart from the answer, up to its budget, and before the form that the answer has."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.runtime.server.served import Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}"
    "{% elif enable_thinking is none %}{% else %}{{ '<think></think>' }}{% endif %}"
)
BEGIN, END = 5, 6  # bytes that no text of the model has
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The shipped model, two of whose bytes are the marks of reasoning."""
    folder = tmp_path_factory.mktemp("thinks")
    shutil.copytree(SHIPPED, folder / "model")
    path = folder / "model" / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    names = {token: text for text, token in vocab.items()}
    for token, mark in ((BEGIN, "<think>"), (END, "</think>")):
        del vocab[names[token]]
        vocab[mark] = token
    path.write_text(json.dumps(document))
    hf = tokenizers.Tokenizer.from_file(str(path))
    hf.add_tokens(["<think>", "</think>"])
    hf.save(str(path))
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    build(BuildConfig(), folder / "checkpoint", folder / "engine")
    with serving_engine(folder / "engine") as served:
        yield served


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={**ASKED, **fields}).json()
    assert "choices" in answer, answer
    (choice,) = answer["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


@pytest.mark.slow
def test_the_budget_ends_it(served: Served) -> None:
    free = ask(served)
    assert (free["content"], free["finish_reason"]) == (None, "length"), "a model that knows no mark goes on"
    cut = ask(served, thinking_token_budget=8)
    assert cut["reasoning"] == cut["reasoning_content"]
    assert free["reasoning"].startswith(cut["reasoning"])
    assert cut["content"]
    assert ask(served, thinking_token_budget=8, include_reasoning=False).keys().isdisjoint(("reasoning",))


def test_pieces_add_up_and_never_mix(served: Served) -> None:
    whole = ask(served, thinking_token_budget=8)
    with served.client() as client:
        chunks = list(client.chat.completions.create(**ASKED, stream=True, extra_body={"thinking_token_budget": 8}))
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    assert all(not ("reasoning" in each and each.get("content")) for each in deltas)
    for field in ("reasoning", "reasoning_content", "content"):
        assert "".join(each.get(field, "") for each in deltas) == whole[field]


def test_a_form_begins_behind_it(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 100, "maximum": 999}}}
    found = ask(served, thinking_token_budget=8, response_format=form)
    assert found["reasoning"]
    assert 100 <= json.loads(found["content"]) <= 999
    assert found["finish_reason"] == "stop"
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        found = ask(served, response_format=form, **off)
        assert 100 <= json.loads(found["content"]) <= 999
        assert "reasoning" not in found


def test_a_model_that_may_reason_keeps_to_the_form_if_it_does_not(served: Served) -> None:
    form = {"guided_regex": "[a-c]{5}", "chat_template_kwargs": {"enable_thinking": None}}
    found = ask(served, **form)
    assert len(found["content"]) == 5
    banned = ask(served, **form, logit_bias={str(BEGIN): 100}, thinking_token_budget=4)
    assert banned["reasoning"]
    assert len(banned["content"]) == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "differ"),
        ({"chat_template_kwargs": {"thinking": False}}, "no variable 'thinking'"),
        ({"thinking_token_budget": -1}, "greater than or equal"),
    ],
)
def test_what_contradicts_itself_is_refused(served: Served, fields: dict[str, Any], words: str) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={**ASKED, **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_model_that_does_not_reason_has_no_budget(engine: Path) -> None:
    with serving_engine(engine) as plain, plain.http() as http:
        for fields in ({"thinking_token_budget": 3}, {"reasoning_effort": "low"}):
            answer = http.post("/v1/chat/completions", json={**ASKED, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(fields))
        off = http.post("/v1/chat/completions", json={**ASKED, "max_tokens": 2, "reasoning_effort": "none"})
        assert off.status_code == 200, "it is off as it is"
