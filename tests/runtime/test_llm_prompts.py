"""`LLM` as scripts written for vLLM use it: dictionaries, conversations, a progress bar; what is unknown is refused."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ingot.configs.sampling import SamplingParams
from ingot.errors import IngotError, RequestError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.llm import EngineLLM
from ingot.runtime.llm_chat import ChatTokenizer, Message
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.tiny_engine import make_runner
from tests.runtime.tiny_plan import make_model

SHORT = SamplingParams(max_tokens=3, temperature=0, seed=1)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    "{% if loud %}!{% endif %}{% if add_generation_prompt %}a{% endif %}"
)
ONE: list[Message] = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
OTHER: list[Message] = [{"role": "developer", "content": [{"type": "text", "text": "3"}]}]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[EngineLLM]:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    session = FakeSession(100, model.plan.tokens_per_block, model.plan.limits)
    runner = make_runner(model, session)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    runner.engine = dataclasses.replace(runner.engine, directory=tmp_path)
    with EngineLLM(runner, byte_tokenizer(tmp_path, VOCAB)) as llm:
        yield llm


def tokens(llm: EngineLLM, prompts: Any = None, **named: Any) -> list[tuple[str | None, list[int], list[int]]]:
    results = llm.generate(prompts, SHORT, **named)
    return [(each.prompt, each.prompt_token_ids, each.outputs[0].token_ids) for each in results]


def test_every_form_of_a_prompt(llm: EngineLLM) -> None:
    text, ids = ("12", [16, 17], continued([16, 17], 3)), (None, [5, 6], continued([5, 6], 3))
    assert llm.tokenizer.encode("12") == [16, 17]
    assert tokens(llm, "12") == tokens(llm, {"prompt": "12"}) == tokens(llm, [{"prompt": "12"}]) == [text]
    assert tokens(llm, [5, 6]) == tokens(llm, {"prompt_token_ids": [5, 6]}) == [ids]
    assert tokens(llm, prompt_token_ids=[5, 6]) == tokens(llm, prompt_token_ids=[[5, 6]]) == [ids]
    mixed = ["12", {"prompt_token_ids": [5, 6], "multi_modal_data": None}, {"prompt": "12", "cache_salt": "a"}]
    assert tokens(llm, mixed) == [text, ids, text]


def test_the_salt_of_a_dictionary_is_applied(llm: EngineLLM) -> None:
    prompt = [7] * 40
    for salt, hits in (("a", 0), ("b", 0), ("a", 39 // llm.runner.blocks.tokens_per_block)):
        before = llm.stats()["prefix_hit_tokens"]
        tokens(llm, {"prompt_token_ids": prompt, "cache_salt": salt})
        assert llm.stats()["prefix_hit_tokens"] - before == hits * llm.runner.blocks.tokens_per_block


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "neither"),
        ({"prompts": "1", "prompt_token_ids": [1]}, "both"),
        ({"prompts": {}}, "either text or token ids"),
        ({"prompts": {"prompt": "1", "prompt_token_ids": [1]}}, "prompt and prompt_token_ids"),
        ({"prompts": {"prompt": [1]}}, '"prompt" of a prompt must be text'),
        ({"prompts": {"prompt_token_ids": "1"}}, '"prompt_token_ids" of a prompt must be a list'),
        ({"prompts": {"prompt": "1", "multi_modal_data": {"image": 1}}}, "reads text only"),
        ({"prompts": [{"promt": "1"}]}, "did you mean 'prompt'"),
        ({"prompts": {"prompt": "1", "cache_salt": 3}}, "cache_salt must be text"),
        ({"prompts": {1: "1"}}, "no argument '1'"),
        ({"prompts": "1", "use_tqdm": print}, "cannot be replaced"),
        ({"prompts": "1", "use_tqdm": 1}, "use_tqdm must be True or False"),
        ({"prompts": "1", "lora_request": object()}, "adapters do not exist"),
        ({"prompts": "1", "max_tokens": 3}, r"SamplingParams\(max_tokens=...\)"),
        ({"prompts": "1", "sampling_parms": SHORT}, "did you mean 'sampling_params'"),
    ],
)
def test_what_generate_refuses(llm: EngineLLM, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(**arguments)
    assert llm.runner.step_log() == []


def test_an_argument_that_says_nothing_may_be_spelled_out(llm: EngineLLM) -> None:
    assert tokens(llm, "12", lora_request=None, use_tqdm=False) == tokens(llm, "12")


def test_generate_async_takes_dictionaries_and_no_others(llm: EngineLLM) -> None:
    with pytest.raises(RequestError, match="either text or token ids"):
        llm.generate_async({"cache_salt": "1"})
    with pytest.raises(RequestError, match="adapters do not exist"):
        llm.generate_async("1", SHORT, lora_request=object())


def test_chat(llm: EngineLLM) -> None:
    (single,) = llm.chat(ONE, SHORT)
    assert single.prompt == "s1u2a"
    assert single.prompt_token_ids == llm.tokenizer.encode("s1u2a")
    assert single.outputs[0].token_ids == continued(single.prompt_token_ids, 3)
    both = llm.chat([ONE, OTHER], [SHORT, dataclasses.replace(SHORT, max_tokens=2)])
    assert [(each.prompt, len(each.outputs[0].token_ids)) for each in both] == [("s1u2a", 3), ("s3a", 2)]
    (quiet,) = llm.chat(ONE, SHORT, add_generation_prompt=False, chat_template_kwargs={"loud": True}, tools=None)
    assert quiet.prompt == "s1u2!"


def test_content_of_a_chat_is_no_control_token(llm: EngineLLM, tmp_path: Path) -> None:
    """The special token is one of the template's own, and letters in a message."""
    file = tmp_path / "tokenizer.json"
    hf = tokenizers.Tokenizer.from_file(str(file))
    hf.add_special_tokens(["12"])
    hf.save(str(file))
    inner = Tokenizer.from_dir(tmp_path)
    templates = ChatTemplates({"default": "12{{ messages[0].content }}"}, {}, source="a test")
    tokenizer = ChatTokenizer(inner, templates, AnswerFormats.find(templates.texts.values(), inner))
    special, letters = VOCAB, [16, 17]
    assert tokenizer.encode("12") == [special]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}]) == [special, *letters]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert type(text) is str
    assert text == "1212"


def test_chat_with_another_template(llm: EngineLLM, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    assert llm.chat(ONE, SHORT, chat_template=str(other))[0].prompt == "1"
    assert llm.chat(ONE, SHORT)[0].prompt == "s1u2a"
    chatml = llm.get_tokenizer("chatml").apply_chat_template(ONE[1:], tokenize=False, add_generation_prompt=True)
    assert chatml == "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "arguments", "words"),
    [
        ("hi", {}, "messages cannot be read"),
        ([], {}, "messages cannot be read"),
        (None, {}, "messages cannot be read"),
        ([ONE, []], {}, "conversation 1"),
        ([{"content": "1"}], {}, "a dictionary with a role"),
        ([ONE, ["hi"]], {}, "a dictionary with a role"),
        ([{"role": "user", "content": 3}], {}, "content of a message must be text"),
        ([{"role": "user", "contnet": "Hi"}], {}, "a message has no content"),
        ([{"role": "developer", "content": None}], {}, "a message has no content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], {}, "the engine reads nothing else"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "must name its function"),
        ([{"role": "assistant", "tool_calls": ["f"]}], {}, "must name its function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            {},
            "must be JSON text or a dictionary",
        ),
        (ONE, {"tools": [{"type": "function"}]}, "a tool must be a function"),
        (ONE, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "has no place for them"),
        (ONE, {"tool_choice": "required"}, "there are no tools"),
        (ONE, {"chat_template": TEMPLATE}, "write the template to a file"),
        (ONE, {"chat_template": "nowhere.jinja"}, "cannot be read"),
        (ONE, {"chat_template_kwargs": {"enable_thinking": True}}, "has no variable 'enable_thinking'"),
        (ONE, {"chat_template_kwargs": {"enable_thinking": 0}}, "has no variable 'enable_thinking'"),
        (ONE, {"chat_template_kwargs": {"messages": []}}, "must not set"),
        (ONE, {"chat_template_kwargs": 3}, "must be a dictionary"),
        (ONE, {"add_generation_prompt": 1}, "add_generation_prompt must be"),
        (ONE, {"continue_final_message": True}, "opens no answer of its own"),
        (ONE, {"continue_final_message": True, "add_generation_prompt": False}, "a last message of the assistant"),
        (ONE, {"use_tqdm": 3}, "use_tqdm must be"),
    ],
)
def test_what_chat_refuses(llm: EngineLLM, messages: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(IngotError, match=words):
        llm.chat(messages, SHORT, **arguments)
    assert llm.runner.step_log() == []


def test_thinking_that_is_turned_off_is_accepted_where_nothing_reasons(llm: EngineLLM) -> None:
    for off in ({"enable_thinking": False}, {"thinking": False}, {"thinking_mode": "disabled"}):
        assert llm.chat(ONE, SHORT, chat_template_kwargs=off)[0].prompt == "s1u2a"


def test_the_tokenizer(llm: EngineLLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("12") == [16, 17]
    assert tokenizer.decode([16, 17]) == "12"
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.apply_chat_template(ONE, tokenize=False) == "s1u2"
    assert tokenizer.apply_chat_template(ONE, add_generation_prompt=True) == tokenizer.encode("s1u2a")
    with pytest.raises(RequestError, match="tokenize must be True or False"):
        tokenizer.apply_chat_template(ONE, tokenize="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "terminal", "count", "shown"),
    [
        (None, True, 2, True),
        (None, True, 1, False),
        (None, False, 2, False),
        (True, False, 1, True),
        (True, True, 1, True),
        (False, True, 2, False),
    ],
)
def test_the_progress_bar(
    llm: EngineLLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: bool | None,
    terminal: bool,
    count: int,
    shown: bool,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(["1"] * count, SHORT, use_tqdm=wanted),
        lambda: llm.chat([ONE] * count, SHORT, use_tqdm=wanted),
    ]
    for call in calls:
        call()
        out, err = capsys.readouterr()
        assert out == ""
        assert (f"{count}/{count}" in err) == shown
        assert shown or err == ""
