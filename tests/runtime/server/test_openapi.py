"""The OpenAPI document is true: requests made from it get answers that it describes."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest

from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:schemathesis", "ignore::Warning:jsonschema")
def test_schemathesis(served: Served) -> None:
    import schemathesis  # here, since it takes as long as hundreds of tests
    from schemathesis.checks import load_all_checks

    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        if operation.path.startswith(("/debug", "/kv/events")):  # a stream without end
            continue

        @hypothesis.settings(
            max_examples=3, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            case.call_and_validate(
                timeout=60, excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
            )

        holds()
    assert eventually(served.is_empty, 30)


def test_errors_look_as_described(served: Served) -> None:
    document = httpx.get(f"{served.url}/openapi.json").json()
    schema = document["components"]["schemas"]["Error"]
    with served.http() as http:
        for answer in (
            http.post("/v1/completions", json={}),
            http.get("/v1/completions"),
            http.get("/v1/embeddings"),
            http.get("/nowhere"),
            http.post("/v1/chat/completions", content=b"{"),
        ):
            assert 400 <= answer.status_code < 500
            jsonschema.validate(answer.json(), schema)
            assert answer.headers["x-request-id"]


def test_tokens_there_and_back(served: Served) -> None:
    with served.http() as http:
        text = "The prince é 你"
        there = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert there["tokens"] == served.service.tokenizer.encode(text)
        assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
        assert there["max_model_len"] == served.runner.model_info.limits.max_seq_len
        plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        chat = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert chat[0] == served.runner.engine.manifest.bos_id, "the built-in template has no BOS of its own"
        assert chat.count(chat[0]) == 1
        answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == len(chat)
        for body in ({}, {"prompt": "a", "messages": messages}, {"tokens": [1]}):
            assert http.post("/tokenize", json=body).status_code == 400
        for tokens in ([10**9], [-1], "a"):
            assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_arguments_of_templates_are_applied_or_refused(engine: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ bos_token }}{% if loud is defined %}{{ messages[0].content | upper }}{% endif %}the")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "prince"}]}
    with (
        serving_engine(engine, dataclasses.replace(CONFIG, chat_template=str(template))) as served,
        served.http() as http,
    ):
        plain = http.post("/tokenize", json=body).json()["count"]
        assert http.post("/tokenize", json={**body, "chat_template_kwargs": {"loud": 1}}).json()["count"] > plain
        for path in ("/tokenize", "/v1/chat/completions"):
            for name, param in (("quiet", "chat_template_kwargs.quiet"), ("range", "chat_template_kwargs.range")):
                answer = http.post(path, json={**body, "chat_template_kwargs": {name: 1}})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            for name in ("enable_thinking", "thinking"):  # nothing thinks: off is so already
                limit = {} if path == "/tokenize" else {"max_tokens": 2}
                off, on, unset = (
                    http.post(path, json={**body, **limit, "chat_template_kwargs": {name: value}})
                    for value in (False, True, None)
                )
                assert off.status_code == 200, off.text
                for refused in (on, unset):
                    assert refused.json()["error"]["param"] == f"chat_template_kwargs.{name}"
        off = http.post("/tokenize", json={**body, "chat_template_kwargs": {"thinking": False}})
        assert off.json()["count"] == plain
        assert http.post("/tokenize", json={**body, "chat_template_kwargs": {"messages": 1}}).status_code == 400


@pytest.mark.parametrize("common", [False, True])
def test_control_tokens_in_messages(engine: Path, common: bool) -> None:
    config = dataclasses.replace(CONFIG, special_tokens_in_content=common)
    with serving_engine(engine, config) as served, served.http() as http:
        eos = served.service.tokenizer.encode("</s>", add_special_tokens=False)
        assert len(eos) == 1
        call = {"id": "</s>", "type": "function", "function": {"name": "</s>", "arguments": '{"</s>": "</s>"}'}}
        for message in (
            {"role": "user", "content": "a</s>"},
            {"role": "user", "content": [{"type": "text", "text": "</s>"}]},
            {"role": "tool", "content": "</s>", "name": "</s>", "tool_call_id": "</s>"},
            {"role": "assistant", "content": "</s>", "tool_calls": [call], "reasoning_content": "</s>"},
        ):
            body = {"messages": [{"role": "user", "content": "q"}, message]}
            ids = http.post("/tokenize", json=body).json()["tokens"]
            written = 4 if "tool_calls" in message else 1
            assert ids.count(eos[0]) == common * written
            assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"].count("</s>") == written
            answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens"] == len(ids)
        halves = [{"role": "user", "content": "</s"}, {"role": "user", "content": ">"}]
        assert eos[0] not in http.post("/tokenize", json={"messages": halves}).json()["tokens"]
        assert http.post("/tokenize", json={"prompt": "a</s>"}).json()["tokens"].count(eos[0]) == 1
        completion = http.post("/v1/completions", json={"prompt": "</s>" * 9, "max_tokens": 1}).json()
        assert completion["usage"]["prompt_tokens"] == 10, "prompts of completions are taken as they are"


def test_version_and_fingerprint(served: Served) -> None:
    with served.http() as http:
        version = http.get("/version").json()
        assert version["engine"]["target"] == served.runner.engine.manifest.target
        answers = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json() for _ in range(2)]
        assert len({answer["system_fingerprint"] for answer in answers}) == 1
        manifest = (served.runner.engine.directory / "config.json").read_bytes()
        assert answers[0]["system_fingerprint"].endswith(f"-{hashlib.sha256(manifest).hexdigest()[:12]}")
        assert len({answer["id"] for answer in answers}) == 2
