"""Bodies: every field is applied, accepted without effect where the contract says so, or refused by name."""

import json
import time
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from ingot.configs.generation import GenerationDefaults
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.body import read_body
from ingot.runtime.server.messages_protocol import MessagesRequest
from ingot.runtime.server.protocol import (
    ACCEPTED,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ingot.runtime.server.responses_protocol import ResponsesRequest
from ingot.runtime.server.sampling_params import chat_params, completion_params, text_requests

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
RESPONSE: dict[str, Any] = {"input": "hi"}
NOTHING = GenerationDefaults()


def refusal(kind: Any, body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


def test_every_field_of_openai_has_a_place() -> None:
    for theirs, ours in ((ChatParams, ChatRequest), (CompletionParams, CompletionRequest)):
        fields = {*theirs.__annotations__, "stream"}
        assert len(fields) > 15
        assert [name for name in fields if name not in ours.model_fields and name not in REFUSED] == []
    assert not set(REFUSED) & (set(ChatRequest.model_fields) | set(CompletionRequest.model_fields))
    assert set(ACCEPTED) <= set(ChatRequest.model_fields)


def test_every_field_of_responses_has_a_place() -> None:
    fields = {*ResponseParams.__annotations__, "stream"}
    assert len(fields) > 15
    places = {*ResponsesRequest.model_fields, *ResponsesRequest.refused, *REFUSED}
    assert fields - places == set()


@pytest.mark.parametrize("name", ResponsesRequest.refused)
def test_responses_give_the_reason(name: str) -> None:
    error = refusal(ResponsesRequest, {**RESPONSE, name: {"a": 1}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert ResponsesRequest.refused[name] in error.message


def test_defaults_that_clients_send_are_taken() -> None:
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}}
    output = {"type": "function_call_output", "call_id": "c", "output": "1", "name": "f", "namespace": None}
    tool = {"type": "function", "name": "f", "parameters": {}, "defer_loading": False, "allowed_callers": ["direct"]}
    fields = {"context_management": [], "prompt_cache_retention": "in_memory", "text": {"verbosity": "medium"}}
    user = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    body = {"input": [user, called, output], "tools": [tool], "reasoning": {"context": "auto"}, **fields}
    asked = read_body(ResponsesRequest, json.dumps(body).encode()).as_chat()
    assert asked.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for wrong in ({"text": {"verbosity": "low"}}, {"context_management": [{"type": "compaction"}]}, {"store": True}):
        refusal(ResponsesRequest, {**RESPONSE, **wrong})
    read_body(ChatRequest, json.dumps({**CHAT, "verbosity": "medium", "prompt_cache_retention": None}).encode())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_give_the_reason(name: str) -> None:
    error = refusal(ChatRequest, {**CHAT, name: {"a": 1}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert REFUSED[name] in error.message
    read_body(ChatRequest, json.dumps({**CHAT, name: None}).encode())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**TEXT, "temprature": 1}, "temprature"),
        ({**TEXT, "zzz": None}, "zzz"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -2]}, "prompt.1"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({**TEXT, "n": "2"}, "n"),
        ({**TEXT, "n": 2.0}, "n"),
        ({**TEXT, "n": True}, "n"),
        ({**TEXT, "stream": 1}, "stream"),
        ({**TEXT, "stop": [""]}, "stop.0"),
        ({**TEXT, "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({**TEXT, "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({**TEXT, "store": True}, "store"),
        ({**TEXT, "service_tier": "flex"}, "service_tier"),
        ({**TEXT, "logprobs": 21}, "logprobs"),
        ({**TEXT, "stream_options": {"x": 1}}, "stream_options.x"),
        ({**TEXT, "timeout": 0}, "timeout"),
        ({**TEXT, "stop": [None]}, "stop.0"),
        ({**TEXT, "stop": 5}, "stop"),
        ({**TEXT, "best_of": True}, "best_of"),
        ({**TEXT, "best_of": 1, "n": 2}, "best_of"),
        ({**TEXT, "use_beam_search": 0}, "use_beam_search"),
        ({**TEXT, "logit_bias": {"\u0663": 1}}, "logit_bias.\u0663"),
        ({**TEXT, "logit_bias": {"07": 1}}, "logit_bias.07"),
        ({**TEXT, "stop_token_ids": [1] * 5000}, "stop_token_ids"),
        ({**TEXT, "bad_words": ["a"] * 5000}, "bad_words"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, body)
    assert error.param == param
    assert param.split(".")[0] in error.message
    assert error.body()["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_typos_and_broken_json() -> None:
    assert "did you mean 'temperature'?" in refusal(CompletionRequest, {**TEXT, "temprature": 1}).message
    for data in (b"{", b"[]", b"", b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000):
        refusal(CompletionRequest, data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'{"prompt": "a", "n": 1, "n": 2}', "n"),
        (b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}', "x"),
        (b'{"prompt": "a", "metadata": {"b": [{"c": 1, "c": 2}]}}', "c"),
    ],
)
def test_a_field_cannot_be_there_twice(data: bytes, name: str) -> None:
    error = refusal(CompletionRequest, data)
    assert (error.param, error.message) == (name, f"the field {name!r} is there twice")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (CompletionRequest, b'{"prompt": [' + b"1.5," * 250_000 + b"1]}"),
        (CompletionRequest, b'{"prompt": ["a",' + b"1," * 500_000 + b"1]}"),
        (CompletionRequest, b'{"prompt": "a", "stop_token_ids": [' + b"-1," * 340_000 + b"1]}"),
        (CompletionRequest, b'{"prompt": "a", "bad_words": [' + b'"",' * 300_000 + b'"a"]}'),
        (ChatRequest, b'{"messages": [{"role": "user", "content": [' + b"{}," * 300_000 + b"{}]}]}"),
        (ChatRequest, b'{"messages": [{"role": "assistant", "tool_calls": [' + b"1," * 300_000 + b"1]}]}"),
    ],
)
def test_hostile_bodies_are_refused_quickly(kind: Any, data: bytes) -> None:
    """Nothing else runs meanwhile: a complaint about each of a million values would stop every stream for seconds."""
    begin = time.thread_time()
    refusal(kind, data)
    assert time.thread_time() - begin < 1


def test_only_the_first_of_many_mistakes_is_looked_at() -> None:
    many = {f"x{place}": 1 for place in range(100)}
    assert refusal(ChatRequest, {"messages": [{"role": "user", "content": "a", **many}]}).param == "messages.0.x0"
    assert refusal(CompletionRequest, {**TEXT, "stream_options": many}).param == "stream_options.x0"
    assert refusal(CompletionRequest, {**TEXT, "logit_bias": {f"x{n}": 1 for n in range(5000)}}).param == "logit_bias"


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    message: Any = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    asked = read_body(ChatRequest, json.dumps({"messages": [*CHAT["messages"], message]}).encode())
    assert asked.messages[1].for_template() == {"role": "assistant", "content": "b"}
    assert refusal(ChatRequest, {"messages": [{**message, "audio": {"id": "x"}}]}).param == "messages.0.audio"
    assert refusal(ChatRequest, {"messages": [{**message, "annotations": [{}]}]}).param == "messages.0.annotations"


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_only_an_assistant_may_say_nothing(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        error = refusal(ChatRequest, {"messages": [*CHAT["messages"], message]})
        assert (error.param, "content is missing" in error.message) == ("messages.1", True)
    body = {"messages": [{"role": role, "content": ""}, {"role": "assistant"}]}
    assert len(read_body(ChatRequest, json.dumps(body).encode()).messages) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "auto"},
        {"service_tier": "default"},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"response_format": {"type": "text"}},
    ],
)
def test_what_clients_send_by_themselves_changes_nothing(fields: dict[str, Any]) -> None:
    asked = read_body(ChatRequest, json.dumps({**CHAT, **fields}).encode())
    assert chat_params(asked, NOTHING) == chat_params(read_body(ChatRequest, json.dumps(CHAT).encode()), NOTHING)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ({}, "function"),
        ({"function": {"arguments": "{}"}}, "function.name"),
        ({"function": {"name": "f", "arguments": 3}}, "function.arguments"),
        ({"function": {"name": "f"}, "type": "custom"}, "type"),
        ({"function": {"name": "f"}, "id": 3}, "id"),
    ],
)
def test_calls_of_earlier_answers_are_calls(call: dict[str, Any], place: str) -> None:
    for kind in (ChatRequest, TokenizeRequest):
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        assert str(refusal(kind, body).param).startswith(f"messages.0.tool_calls.0.{place}")


@pytest.mark.parametrize(
    "fields", [{"tools": [{"type": "function"}], "tool_choice": "auto"}, {"parallel_tool_calls": True, "tools": [{}]}]
)
def test_what_clients_mean_is_refused_though_its_company_is_neutral(fields: dict[str, Any]) -> None:
    assert refusal(CompletionRequest, {"prompt": "a", **fields}).param == "tools"
    for name in ("tool_choice", "parallel_tool_calls"):
        assert refusal(CompletionRequest, {"prompt": "a", name: "required"}).param == name


def test_the_best_of_several_is_refused() -> None:
    assert read_body(CompletionRequest, b'{"prompt": "a", "best_of": 1, "n": 1}').n == 1
    for fields in ({"best_of": 2}, {"best_of": 2, "n": 2}, {"best_of": 1, "n": 2}, {"best_of": True}):
        assert refusal(CompletionRequest, {"prompt": "a", **fields}).param == "best_of"


def test_reasoning_of_earlier_answers_goes_to_the_template_under_its_old_name() -> None:
    def seen(**fields: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": "b", "id": "msg_1", **fields}
        return read_body(ChatRequest, json.dumps({"messages": [message]}).encode()).messages[0].for_template()

    plain = {"role": "assistant", "content": "b"}
    assert seen() == plain
    assert seen(reasoning="r") == seen(reasoning_content="r") == {**plain, "reasoning_content": "r"}
    assert seen(reasoning="r", reasoning_content="c") == {**plain, "reasoning_content": "c"}
    assert refusal(ChatRequest, {"messages": [{**plain, "id": 5}]}).param == "messages.0.id"


def test_a_byte_order_mark_is_no_part_of_the_json() -> None:
    mark = b"\xef\xbb\xbf"
    assert read_body(CompletionRequest, mark + b'{"prompt": "a"}').prompt == "a"
    refusal(CompletionRequest, mark + mark + b'{"prompt": "a"}')


def test_arguments_of_tools_become_objects_for_the_template() -> None:
    for given, expected in (
        ('{"a": [1]}', {"a": [1]}),
        ("no json", "no json"),
        ("[1]", "[1]"),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
    ):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        (message,) = read_body(ChatRequest, json.dumps(body).encode()).messages
        assert message.for_template()["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}


def test_messages() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused = refusal(ChatRequest, {"messages": [{"role": "user", "content": image}]})
    assert refused.message == "'image_url' is refused: the engine reads and writes text only"
    picture = {"type": "image", "source": {"type": "url", "url": "x"}}
    shown = {"max_tokens": 1, "messages": [{"role": "user", "content": [picture]}]}
    assert refusal(MessagesRequest, shown).message == "'image' is refused: the engine reads and writes text only"
    asked_of = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    assert refusal(ResponsesRequest, asked_of).message.startswith("'input_image' is refused: the engine reads")
    assert refusal(ChatRequest, {"messages": [{"role": "user", "content": image}]}).param == "messages.0.content.0.type"
    assert refusal(ChatRequest, {"messages": [{"role": "bot", "content": "a"}]}).param == "messages.0.role"
    assert refusal(ChatRequest, {"messages": [{"role": "user", "content": "a", "x": 1}]}).param == "messages.0.x"
    assert refusal(ChatRequest, {"messages": []}).param == "messages"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = read_body(ChatRequest, json.dumps({"messages": [{"role": "developer", "content": parts}]}).encode())
    assert asked.messages[0].for_template() == {"role": "system", "content": "a\nb"}


def test_prompts() -> None:
    for prompt, expected in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert read_body(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompts() == expected
    assert read_body(DetokenizeRequest, b'{"tokens": [1]}').tokens == [1]
    assert refusal(TokenizeRequest, {"content": "a"}).param == "content"


def completion(**fields: Any) -> CompletionRequest:
    return read_body(CompletionRequest, json.dumps({**TEXT, **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return read_body(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def test_parameters() -> None:
    params = completion_params(
        completion(seed=-1, logit_bias={"7": -100}, stop=["a"], top_k=5, temperature=0.5, logprobs=2, echo=True),
        NOTHING,
    )
    assert (params.seed, params.logit_bias, params.stop) == (2**64 - 1, {7: -100.0}, ["a"])
    assert (params.top_k, params.temperature, params.logprobs, params.prompt_logprobs) == (5, 0.5, 2, 2)
    (asked,) = text_requests(completion(), ["hi"], params)
    assert asked.default_max_tokens == 16, "OpenAI's default for completions"
    assert text_requests(chat(), ["hi"], params)[0].default_max_tokens is None
    assert completion_params(completion(max_tokens=0, echo=True), NOTHING).max_tokens == 1
    assert chat_params(chat(), NOTHING).max_tokens is None
    assert chat_params(chat(max_tokens=5), NOTHING).max_tokens == 5
    assert chat_params(chat(max_tokens=5, max_completion_tokens=5), NOTHING).max_tokens == 5
    assert chat_params(chat(logprobs=True), NOTHING).logprobs == 0
    assert chat_params(chat(logprobs=True, top_logprobs=4), NOTHING).logprobs == 4


def test_generation_config_speaks_where_the_request_does_not() -> None:
    defaults = GenerationDefaults(do_sample=True, temperature=0.7, top_k=40, others={"min_p": 0.1})
    params = completion_params(completion(), defaults)
    assert (params.temperature, params.top_k, params.min_p) == (0.7, 40, 0.1)
    params = completion_params(completion(temperature=0.1, min_p=0.2), defaults)
    assert (params.temperature, params.top_k, params.min_p) == (0.1, 40, 0.2)
    assert completion_params(completion(), NOTHING).temperature == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_contradictions_in_chats(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_params(chat(**fields), NOTHING)
    assert caught.value.param == param


def test_contradictions_in_completions() -> None:
    for fields in ({"max_tokens": 0, "min_tokens": 1}, {"echo": True, "logprobs": 1, "n": 2, "stream": True}):
        with pytest.raises(ApiError):
            completion_params(completion(**fields), NOTHING)
