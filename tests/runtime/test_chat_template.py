"""Chat templates give the same bytes as transformers' apply_chat_template, and refuse in words."""

import datetime
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ingot.errors import ConfigError, RequestError, UsageError
from ingot.runtime.chat_template import CHATML, ChatTemplates
from ingot.runtime.tokenizer import Tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says <how> it is & "will be".',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "id": "abc123def", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>there</b> & all"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " Hi "}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "tool_calls": None},
        {"role": "user", "content": "{{ 3 }} {% if %}"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 20}', "tool_call_id": "abc123def"},
    ],
    [
        {"role": "user", "content": "Think"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "reasoning": "so"},
        {"role": "user", "content": "?"},
    ],
]
TEMPLATES = {
    "headers": (
        "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "Today: {{ strftime_now('%d %b %Y') }}\n{{ system }}\n"
        "{% if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
        "{% for message in rest %}<{{ message.role }}>{{ message.content | default('-') }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "controls": (
        "{% set ns = namespace(last=-1, seen=[]) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% if message.role == 'tool' %}{% continue %}{% endif %}"
        "  {% generation %}{{ message.content }}{% endgeneration %}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ ns.last }} {{ dict(a=1, b='é') | tojson }} {{ messages | tojson(ensure_ascii=true, sort_keys=true) }}"
        "{{ documents is none }} {{ enable_thinking is defined }} {{ unk_token }}"
    ),
    "reasoning": (
        "{% for message in messages %}{{ message.reasoning_content }}|{{ message.thinking }}|{{ message.tool_calls }}"
        "{% if message.content is string %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}"
        "\n    {# a remark #}\n{% endfor %}"
    ),
    "operations": (  # content is str in whatever templates do
        "{% for message in messages %}{% set c = message.content | default('-', true) %}{% if c is string %}"
        "{{ c | upper }}{{ c | title | capitalize | lower }}{{ c | trim | replace('i', '<i>') | replace('', '-', 2) }}"
        "{{ c | indent(3, true) }}{{ c | truncate(5) }}{{ c | wordwrap(4) }}{{ '%s|%5s' | format(c, c) }}"
        "{{ '%s' % c }}{{ 'a{}b{x}'.format(c, x=c) }}{{ c | center(40) }}{{ c[1:] ~ c[:1] ~ c[-1] ~ 5 ~ none }}"
        "{{ c | reverse }}{{ c | list | sort | join('<') }}{{ c.split() | map('upper') | join(c) }}{{ c | wordcount }}"
        "{{ [message] | join('+', attribute='role') }}{{ c | first }}{{ c | urlize }}{{ c | striptags }}{{ c * 2 }}"
        "{{ c.partition(' ') }}{{ c.split('e', 1) | tojson }}{{ c.splitlines() }}{{ [c, {c: c}, (c,)] }}"
        "{{ {'role': c} | xmlattr }}{{ '<' + (c | e) + '>' + c | safe }}{{ (c | safe) + '<' }}{{ ('<' | e) + c }}"
        "{{ c | pprint }}{{ c == message.content }}{{ 'Hi' in c }}{{ c.startswith('Hi') }}{{ c < 'Hi' }}"
        "{{ c | batch(3) | list }}{{ c | groupby(0) | list | length }}{{ c | unique | list }}{{ c is lower }}"
        "{% filter upper %}{{ c }}{% endfilter %}{% set x %}<{{ c }}>{% endset %}{{ x }}{{ x | string | e }}"
        "{% macro f(y, z='d') %}{{ y }}{{ z }}{{ caller() if caller }}{% endmacro %}{{ f(c) }}{% call f(c) %}in"
        "{% endcall %}{{ c.isalpha() }}{{ c.encode().decode() }}{{ c.center(9, '*') }}{{ c.zfill(30) }}"
        "{{ c.join([1 | string, c]) }}{{ ''.join(c) }}{{ c.removeprefix('Hi').removesuffix('all') }}{{ c | int }}"
        "{{ c.rsplit(' ', 1) }}{{ c.strip('Hial') }}{{ c.swapcase() }}{{ c.translate({72: 'J'}) }}{{ c.casefold() }}"
        "{% for x in c %}{{ loop.index }}{{ x }}{% endfor %}{{ c | select('in', 'aeiou') | list }}{{ c.__class__ }}"
        "{% endif %}{% endfor %}"
    ).replace("", ""),
    "chatml": CHATML,
}


def write_tokenizer(folder: Path, config: dict[str, Any]) -> Path:
    """A tokenizer of one word with this tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    base = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": "<unk>"}
    document = {**base, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder


def outcome(call: Callable[[], object]) -> str:
    """Text, or that it was refused."""
    try:
        return str(call())
    except Exception:
        return "refused"


def same_everywhere(folder: Path, *, tools: bool = True) -> int:
    """How many renderings there were to compare."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), ChatTemplates.from_dir(folder)
    assert not ours.built_in
    count = 0
    for chat in CHATS:
        for add in (False, True):
            for each in (None, [TOOL]) if tools else (None,):
                for arguments in ({}, {"enable_thinking": False}):
                    options: dict[str, Any] = {"tools": each, "add_generation_prompt": add}
                    expected = outcome(
                        partial(theirs.apply_chat_template, chat, tokenize=False, **options, **arguments)
                    )
                    got = outcome(partial(ours.render, chat, arguments=arguments, **options))
                    assert got == expected
                    count += expected != "refused"
    return count


@pytest.mark.parametrize("name", TEMPLATES)
def test_written_templates(name: str, tmp_path: Path) -> None:
    assert same_everywhere(write_tokenizer(tmp_path, {"chat_template": TEMPLATES[name]})) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_templates_of_real_models(name: str, shared: Path) -> None:
    assert same_everywhere(shared / "tokenizers" / name) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_ids_of_real_models(name: str, shared: Path) -> None:
    folder = shared / "tokenizers" / name
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), ChatTemplates.from_dir(folder)
    tokenizer = Tokenizer.from_dir(folder)
    for chat in CHATS[:3]:
        chat = [{"role": "user", "content": "say <im_end> |im_end|> caf\u0065\u0301"}, *chat]
        expected = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.encode(chat, tokenizer) == expected


def test_where_templates_are_found(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "D {{ bos_token }}"}, {"name": "tool_use", "template": "T {{ tools }}"}]
    folder = write_tokenizer(tmp_path, {"chat_template": listed})
    assert same_everywhere(folder) == 40
    assert ChatTemplates.from_dir(folder).render(CHATS[0], tools=[TOOL]).startswith("T [")
    (folder / "chat_template.jinja").write_text("from a file {{ messages | length }}")
    assert same_everywhere(folder) == 40
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more {{ tools | length }}")
    assert same_everywhere(folder) == 40
    assert ChatTemplates.from_dir(folder).render(CHATS[0], tools=[TOOL]) == "more 1"
    given = tmp_path / "given.jinja"
    given.write_text("given {{ eos_token }}")
    assert ChatTemplates.from_dir(folder, str(given)).render(CHATS[0]) == "given </s>"
    assert ChatTemplates.from_dir(folder, "chatml").render(CHATS[0]).startswith("<|im_start|>user\nHi <b>")


def test_dates_are_todays(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, {"chat_template": "{{ strftime_now('%Y-%m-%d') }}"})
    assert ChatTemplates.from_dir(folder).render(CHATS[0]) == datetime.date.today().isoformat()


def test_without_a_template_chatml_stands_in(tmp_path: Path) -> None:
    templates = ChatTemplates.from_dir(write_tokenizer(tmp_path, {}))
    assert templates.built_in
    assert templates.render(CHATS[1]) == (
        "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must stay in order') }}",
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_a=1) }}",
        "{{ 'a' + 1 }}",
        "{{ messages[0]['x']['y'] }}",
        "{{ [0] * 2 ** 60 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ strftime_now(5) }}",
        "{% set ns = namespace(a=1) %}{% set ns._b = 2 %}",
    ],
)
def test_refusals_are_words(template: str, tmp_path: Path) -> None:
    templates = ChatTemplates.from_dir(write_tokenizer(tmp_path, {"chat_template": template}))
    with pytest.raises(RequestError, match=r"the chat template (refuses|cannot render) these messages") as caught:
        templates.render(CHATS[0])
    assert ("stay in order" in str(caught.value)) == ("stay" in template)


def test_what_cannot_be_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid jinja2"):
        ChatTemplates.from_dir(write_tokenizer(tmp_path, {"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match="neither text nor a list"):
        ChatTemplates.from_dir(write_tokenizer(tmp_path, {"chat_template": [1]}))
    with pytest.raises(ConfigError, match="neither text nor a list"):
        ChatTemplates.from_dir(write_tokenizer(tmp_path, {"chat_template": [{"name": "default", "template": "x"}, 1]}))
    with pytest.raises(UsageError, match="cannot be read"):
        ChatTemplates.from_dir(tmp_path, "missing.jinja")
    alone = write_tokenizer(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(RequestError, match="none is the default"):
        ChatTemplates.from_dir(alone).render(CHATS[0])
    with pytest.raises(RequestError, match="must not set 'messages'"):
        ChatTemplates.from_dir(tmp_path, "chatml").render(CHATS[0], arguments={"messages": []})
