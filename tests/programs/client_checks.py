"""What official clients and frameworks of agents ask of a server, as their users have it. Needs no ingot.

python tests/programs/client_checks.py URL MODEL [NAME ...]

URL is without /v1. Prints a line for each client; those that are not installed are left out. Exit code 1: one failed.
"""

import importlib.metadata
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

QUESTION = "How is it?"
SCHEMA: dict[str, Any] = {
    "title": "weather",
    "description": "Sky",
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "grey"]}, "deg": {"type": "integer", "minimum": -40, "maximum": 40}},
    "required": ["sky", "deg"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a small model fills the room between the parts
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Sky", "parameters": SCHEMA, "strict": True},
}
MOST = 100


def fits(answer: Any) -> None:
    """Raises AssertionError for what SCHEMA does not allow."""
    assert isinstance(answer, dict), answer
    assert set(answer) == {"sky", "deg"}, answer
    assert answer["sky"] in ("clear", "grey"), answer
    assert -40 <= answer["deg"] <= 40, answer


def token_of(url: str, text: str) -> int:
    """The last one of a text."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    with urllib.request.urlopen(f"{url}/tokenize", body, timeout=120) as answer:
        return int(json.load(answer)["tokens"][-1])


def check_openai(url: str, model: str) -> None:
    """parse() with a schema, a required call in a stream, its result in the history, responses."""
    import openai

    messages: Any = [{"role": "user", "content": QUESTION}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    tools: Any = [TOOL]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        chats = client.chat.completions
        made = chats.create(model=model, messages=messages, response_format=form, max_tokens=MOST, temperature=0)
        fits(json.loads(made.choices[0].message.content or ""))
        asked: Any = {"model": model, "messages": messages, "tools": tools, "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False, "max_tokens": MOST, "temperature": 0}
        with chats.stream(**asked) as stream:
            message: Any = stream.get_final_completion().choices[0].message
        (call,) = message.tool_calls
        fits(json.loads(call.function.arguments))
        messages += [message.model_dump(exclude={"parsed"}, exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "grey"}]
        last = chats.create(model=model, messages=messages, tools=tools, max_tokens=4)
        assert last.choices[0].finish_reason in ("stop", "length")
        flat: Any = {"type": "function", **TOOL["function"]}
        answer = client.responses.create(model=model, input=QUESTION, tools=[flat], tool_choice="required", store=False)
        fits(json.loads(next(item.arguments for item in answer.output if item.type == "function_call")))


def check_anthropic(url: str, model: str) -> None:
    """A forced tool in a stream, its result, counting."""
    import anthropic

    messages: Any = [{"role": "user", "content": QUESTION}]
    tool: Any = {"name": "weather", "description": "Sky", "input_schema": SCHEMA}
    asked: Any = {"model": model, "max_tokens": MOST, "tools": [tool], "messages": messages}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120) as client:
        with client.messages.stream(**asked, tool_choice={"type": "tool", "name": "weather"}) as stream:
            whole = stream.get_final_message()
        (block,) = [each for each in whole.content if each.type == "tool_use"]
        assert whole.stop_reason == "tool_use"
        fits(block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "grey"}
        messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**{**asked, "max_tokens": 4}).usage.output_tokens <= 4
        counted = client.messages.count_tokens(model=model, messages=messages, tools=[tool])
        assert counted.input_tokens > 10


def check_langchain(url: str, model: str) -> None:
    """bind_tools, whole and streamed, and with_structured_output in its three ways."""
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": f"{url}/v1", "api_key": "any", "model": model, "max_tokens": MOST, "temperature": 0}
    chat = ChatOpenAI(max_retries=0, timeout=120, **options)
    bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    whole = bound.invoke(QUESTION)
    (call,) = whole.tool_calls
    assert call["name"] == "weather"
    fits(call["args"])
    pieces: Any = None
    for piece in bound.stream(QUESTION):
        pieces = piece if pieces is None else pieces + piece
    assert [each["args"] for each in pieces.tool_calls] == [call["args"]]
    fits(chat.with_structured_output(SCHEMA, method="json_schema", strict=True).invoke(QUESTION))
    fits(chat.with_structured_output(SCHEMA, method="function_calling", strict=True).invoke(QUESTION))
    short = ChatOpenAI(logit_bias={token_of(url, "}"): 100}, **options)  # the shortest of all objects
    assert short.with_structured_output(SCHEMA, method="json_mode").invoke(QUESTION) == {}


def check_litellm(url: str, model: str) -> None:
    """Tools, whole and streamed, and a schema, in both of its ways to servers like ours."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    import litellm

    for way in ("openai", "hosted_vllm"):
        options: Any = {"model": f"{way}/{model}", "api_base": f"{url}/v1", "api_key": "any", "temperature": 0}
        options |= {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": MOST, "timeout": 120}
        asked: Any = {**options, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        whole: Any = litellm.completion(**asked)
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "weather"
        if way == "openai":  # the other way leaves out `additionalProperties` of tools
            fits(json.loads(call.function.arguments))
        built: Any = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
        assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
        answer: Any = litellm.completion(**options, response_format=form)
        fits(json.loads(answer.choices[0].message.content))


def check_llama_index(url: str, model: str) -> None:
    """A call of a tool by its function-calling interface, and an agent that runs to its end."""
    import asyncio

    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    seen = []

    def weather(sky: str, deg: int) -> str:
        """Sky"""
        seen.append((sky, deg))
        return "grey"

    options: Any = {"model": model, "api_base": f"{url}/v1", "api_key": "any", "max_tokens": MOST, "temperature": 0}
    llm = OpenAILike(
        is_chat_model=True, is_function_calling_model=True, context_window=512, max_retries=0, timeout=120, **options
    )
    tool = FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert set(call.tool_kwargs) <= {"sky", "deg"}
    llm.max_tokens = 12  # this model calls nothing of itself: the agent has its text as the answer

    async def run() -> Any:
        return await FunctionAgent(tools=[tool], llm=llm, streaming=True).run(QUESTION, max_iterations=2)

    assert isinstance(str(asyncio.run(run())), str)


CHECKS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "openai": ("openai", check_openai),
    "anthropic": ("anthropic", check_anthropic),
    "langchain": ("langchain-openai", check_langchain),
    "litellm": ("litellm", check_litellm),
    "llama_index": ("llama-index-llms-openai-like", check_llama_index),
}
"""Name → the package that must be there, and what is checked."""


def main(url: str, model: str, names: list[str]) -> int:
    """See the head of this file."""
    failed = 0
    for name in names or CHECKS:
        package, check = CHECKS[name]
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"| {name} | not installed | |", flush=True)
            continue
        try:
            check(url, model)
            print(f"| {name} | {version} | passes |", flush=True)
        except Exception:
            failed += 1
            print(f"| {name} | {version} | fails |", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
