"""Whatever users write, in whatever field, and however a template turns it: only templates write control tokens."""

import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ingot.errors import ConfigError, RequestError
from ingot.quickstart import SHIPPED
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.control_tokens import is_control
from ingot.runtime.template_text import by_template
from ingot.runtime.tokenizer import Tokenizer

HARMLESS = "Gr\u00fc\u00dfe \u65e5\u672c, a < b | c > d"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' ~ m['content'] ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)
TURNS = {  # what templates do to content
    "trim": "<|im_start|>{{ m.content | trim }}<|im_end|>",
    "replace": "<|im_start|>{{ m.content | replace('~', '') }}<|im_end|>",
    "replace method": "<|im_start|>{{ m.content.replace('~', '').replace('^', '<') }}<|im_end|>",
    "split": "<|im_start|>{{ m.content.split('~')[-1] }}{{ m.content.split('~') | join }}<|im_end|>",
    "tojson": "<|im_start|>{{ m | tojson }}<|im_end|>",
    "case": "<|im_start|>{{ m.content | lower }}<|im_end|>",
    "slices": "<|im_start|>{{ m.content[2:] ~ m.content[:2] ~ m.content[::-1] }}<|im_end|>",
    "letters": "<|im_start|>{% for c in m.content %}{{ c }}{% endfor %}{{ m.content | list | join('') }}<|im_end|>",
    "format": "{{ '<|im_start|>%s<|im_end|>' % m.content }}{{ '%s' | format(m.content) }}",
    "blocks": "{% set x %}<|im_start|>{{ m.content }}{% endset %}{% filter trim %}{{ x }}<|im_end|>{% endfilter %}",
    "macros": "{% macro say(x) %}<|im_start|>{{ x }}<|im_end|>{% endmacro %}{{ say(m.content) + say(m.content) }}",
    "indent": "<|im_start|>{{ m.content | indent }}{{ m.content | center(200) }}{{ [m.content] }}<|im_end|>",
    "borders": "<|im_start|><{{ m.content }}>{{ m.content }}|{{ m.content }}<|im_end|>",
    "into": "{{ m.content.replace('^', '<|im_start|>') }}{{ m.content | replace('~', '<|im_end|>') }}",
    "safe": "<|im_start|>{{ m.content | safe }}{{ m.content | e }}{{ m.content | string }}<|im_end|>",
}


def write(folder: Path, hf: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    """A folder with a tokenizer and its settings."""
    hf.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tiny(folder: Path, template: str = CHATML) -> Path:
    """Bytes, a few control tokens of both kinds, and added tokens that are ordinary text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(alphabet)}, []))
    hf.normalizer = normalizers.NFKC()
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", "<s>")
    hf.add_special_tokens([AddedToken(each, normalized=each == "<s>", special=True) for each in special])
    hf.add_tokens([AddedToken(each, normalized=False) for each in ("<think>", "</think>", "\n\n", "<b>", "word")])
    return write(folder, hf, {"chat_template": template, "bos_token": "<s>", "eos_token": "<|im_end|>"})


@cache
def real(name: str, folder: Path) -> tuple[Tokenizer, ChatTemplates, tuple[str, ...]]:
    """A tokenizer, the template of its model or one like it, and all its control tokens."""
    hf = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = tuple(token.content for token in hf.get_added_tokens_decoder().values() if is_control(token))
    own = ChatTemplates.from_dir(folder)
    given = {"llama3.1": LLAMA3, "llama2": LLAMA2, "gpt2": CHATML}.get(name)
    names = {"bos_token": "<s>" if name == "llama2" else "<|begin_of_text|>", "eos_token": "</s>"}
    return (
        Tokenizer.from_dir(folder),
        own if given is None else ChatTemplates({"default": given}, names, source=name),
        texts,
    )


def control(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The control tokens among these."""
    known = {number for number, token in tokenizer._hf.get_added_tokens_decoder().items() if is_control(token)}
    return [token for token in ids if token in known]


def chats(text: str) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Conversations with this text in every field that a user controls, whole and cut in two; and arguments."""
    half = len(text) // 2
    call = {"id": text, "type": text, "function": {"name": text, "arguments": {text: [text, {"x": text}]}}}
    yield [{"role": "user", "content": text}], {}
    yield [{"role": "system", "content": f"wor{text}d"}, {"role": "user", "content": f"{text} {text}{text}"}], {}
    yield [{"role": "user", "content": text[:half]}, {"role": "user", "content": text[half:]}], {}
    yield [{"role": "user", "content": text[:half] + text + text[half:]}], {}
    yield [{"role": "user", "content": "q"}, {"role": "assistant", "content": text, "reasoning_content": text}], {}
    yield [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}], {}
    yield [{"role": "user", "content": "q"}, {"role": "tool", "content": text, "name": text, "tool_call_id": text}], {}
    yield [{"role": text, "content": "q"}, {"role": text.strip("<|>"), "content": text}], {}
    yield [{"role": "user", "content": "q", text: text}], {"enable_thinking": text, "bos_token": text}


def neutral(value: Any, text: str) -> Any:
    """The same conversation without the text: a letter for each of its characters."""
    if isinstance(value, str):
        if value == text.strip("<|>") and value not in ("system", "user", "assistant"):
            return "q" * len(value)
        for part in (text, text[: len(text) // 2], text[len(text) // 2 :]):
            value = value.replace(part, "q" * len(part)) if part else value
        return value
    if isinstance(value, dict):
        return {"q" if key == text else key: neutral(each, text) for key, each in value.items()}
    return [neutral(each, text) for each in value] if isinstance(value, list) else value


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3.1", "phi3", "qwen3"])
def test_no_field_makes_a_control_token_of_a_real_tokenizer(shared: Path, name: str) -> None:
    tokenizer, templates, texts = real(name, shared / "tokenizers" / name)
    for text in texts[:: max(1, len(texts) // 24)] or ("<|endoftext|>",):
        for messages, arguments in chats(text):
            ids = templates.encode(messages, tokenizer, arguments=arguments)
            plain = templates.encode(neutral(messages, text), tokenizer, arguments=neutral(arguments, text))
            assert control(tokenizer, ids) == control(tokenizer, plain), (text, messages)
            rendered = templates.render(messages, arguments=arguments)
            assert "".join(tokenizer.decode(ids, skip_special_tokens=False).split()) == "".join(
                unicodedata.normalize("NFC", rendered).split()
            )
    message = [{"role": "user", "content": "x " + " ".join(texts)}]  # all of them
    harmless = templates.encode([{"role": "user", "content": "q"}], tokenizer)
    assert control(tokenizer, templates.encode(message, tokenizer)) == control(tokenizer, harmless)
    common = templates.encode(message, tokenizer, special_tokens_in_content=True)
    assert len(control(tokenizer, common)) >= len(texts)


@pytest.mark.daily(2)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3.1", "phi3", "qwen3"])
def test_other_content_has_the_ids_of_the_library(shared: Path, name: str) -> None:
    tokenizer, templates, _ = real(name, shared / "tokenizers" / name)
    book = (shared / "data" / "text" / "wikitext2_valid.txt").read_text()[:3000].replace("<unk>", "")
    for text in (HARMLESS, book, "", " a ", "\u0301x", "\n\n  <b>|im_start</b>", "cafe\u0301", "it's", "'s"):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        rendered = str.__str__(templates.render(messages))
        expected = tokenizer._hf.encode(rendered, add_special_tokens=False).ids
        assert templates.encode(messages, tokenizer) == expected
        assert templates.encode(messages, tokenizer, special_tokens_in_content=True) == expected


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["llama2", "llama3.1", "phi3", "qwen3"])
def test_fragments_in_any_order(shared: Path, name: str) -> None:
    tokenizer, templates, texts = real(name, shared / "tokenizers" / name)
    draw = random.Random(name)
    for _ in range(150):
        chosen = draw.choices(texts, k=3)
        parts = [each[draw.randrange(len(each)) :] for each in chosen] + [
            each[: draw.randrange(1, 9)] for each in chosen
        ]
        parts += [draw.choice(chosen), " ", "\n", draw.choice(("\u0301", "a", "<", ">", "|", "\u0338"))]
        messages = [
            {"role": draw.choice(("user", "assistant")), "content": "".join(draw.choices(parts, k=draw.randrange(6)))}
            for _ in range(3)
        ]
        plain = [{**each, "content": "q"} for each in messages]
        ids = templates.encode(messages, tokenizer)
        assert control(tokenizer, ids) == control(tokenizer, templates.encode(plain, tokenizer)), messages


@pytest.mark.daily(14)
@pytest.mark.parametrize("turn", TURNS)
def test_whatever_templates_do_to_content(turn: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, "{% for m in messages %}" + TURNS[turn] + "{% endfor %}")
    tokenizer, templates = Tokenizer.from_dir(folder), ChatTemplates.from_dir(folder)
    texts = (
        "<|im_end|>",
        "<|im_~end|>",
        "~<|im_end|>~",
        "<|IM_END|>",
        ">|dne_mi|<",
        " <|im_end|> ",
        "|im_end|>",
        "<|im_end|",
        "|im_end|><",
        "|>~<|im_end",
        "im_end|>~x<|",
        "^|im_end|>",
        "<think>",
        "<s>",
        "\uff1cs\uff1e",
        "<|im_end|>~~^",
    )
    for text in texts:
        for pair in ((text,), (text, text), (text[:4], text[4:])):
            messages = [{"role": "user", "content": each} for each in pair]
            ids = templates.encode(messages, tokenizer)
            quiet = [{"role": "user", "content": "".join(c if c in "~^" else "q" for c in each)} for each in pair]
            if turn == "replace method":
                quiet = [{"role": "user", "content": each["content"].replace("^", "")} for each in quiet]
            assert control(tokenizer, ids) == control(tokenizer, templates.encode(quiet, tokenizer)), pair
            assert control(tokenizer, ids) or turn == "into", "the template's own tokens are lost"
            rendered = unicodedata.normalize("NFKC", templates.render(messages))
            assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_a_template_whose_tokens_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny(tmp_path))
    for turn in TURNS.values():
        ChatTemplates({"default": "{% for m in messages %}" + turn + "{% endfor %}"}, {}, source="").check(tokenizer)
    ChatTemplates({"default": "{{ raise_exception('no') }}"}, {}, source="").check(tokenizer)
    hidden = ChatTemplates({"default": "{{ '<|im_start|>{}'.format(messages[0].role) }}"}, {}, source="here")
    with pytest.raises(ConfigError, match="cannot be told from content"):
        hidden.check(tokenizer)


def test_templates_see_ordinary_text(tmp_path: Path) -> None:
    """What a template asks of content has the answers of str, also where it holds control tokens."""
    template = (
        "{% for m in messages %}{{ '</think>' in m.content }} {{ m.content.startswith('<think>') }} "
        "{{ m.content == '<think>x</think>y' }} {{ m.content | length }} {{ m.content.split('</think>')[-1] }} "
        "{{ m.content is string }} {{ m.content.index('x') }} {{ {'<think>x</think>y': 1}[m.content] }} "
        "{{ m.content | replace('<think>', '<|im_start|>') }}{% endfor %}"
    )
    folder = tiny(tmp_path, template)
    tokenizer, templates = Tokenizer.from_dir(folder), ChatTemplates.from_dir(folder)
    messages = [{"role": "assistant", "content": "<think>x</think>y"}]
    rendered = templates.render(messages)
    assert rendered == "True True True 17 y True 7 1 <|im_start|>x</think>y"
    ids = templates.encode(messages, tokenizer)
    assert control(tokenizer, ids) == [tokenizer._hf.token_to_id("<|im_start|>")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_what_is_control_and_what_is_text(tmp_path: Path) -> None:
    for text in ("<think>", "</tool_call>", "<|x|>", "[INST]", "</s>", "<\uff5cUser\uff5c>", "{sys}", "\u2581<PRE>"):
        assert is_control(AddedToken(text))
    for text in ("\n\n", "  ", "<b>", "</table>", "<h1>", "word", "\u2581\u2581"):
        assert not is_control(AddedToken(text))
        assert is_control(AddedToken(text, special=True)) == bool(text.strip("\n \u2581"))
    folder = tiny(tmp_path)
    tokenizer, templates = Tokenizer.from_dir(folder), ChatTemplates.from_dir(folder)
    ids = templates.encode([{"role": "user", "content": "<b>word\n\n<|im_end|>"}], tokenizer)
    hf = tokenizer._hf
    assert [token for token in ids if token >= 256] == [
        hf.token_to_id(each) for each in ("<|im_start|>", "<b>", "word", "\n\n", "<|im_end|>", "<|im_start|>")
    ]


def words_of(model: Any, folder: Path, **parts: Any) -> tuple[Tokenizer, ChatTemplates]:
    """A model whose vocabulary holds <s> and </s> as if they were words."""
    hf = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(hf, name, part)
    hf.add_special_tokens([AddedToken(each, normalized=False) for each in ("<unk>", "<s>", "</s>")])
    write(folder, hf, {"bos_token": "<s>", "eos_token": "</s>"})
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    return Tokenizer.from_dir(folder), ChatTemplates(
        {"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}, source=""
    )


def test_vocabularies_that_hold_control_tokens_as_words(tmp_path: Path) -> None:
    letters = [*"<s>/ab\u2581"]
    scored = [(each, -float(place)) for place, each in enumerate(("<unk>", "<s>", "</s>", *letters))]
    table = {each: place for place, (each, _) in enumerate(scored)}
    merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")]
    bpe = {**table, "<s": 20, "</": 21, "</s": 22}
    pairs = {
        "unigram": (models.Unigram(scored, 0, False), {}),
        "words": (models.WordLevel(table, "<unk>"), {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}),
        "merges": (models.BPE(bpe, merges, unk_token="<unk>"), {}),
    }
    for name, (model, parts) in pairs.items():
        folder = tmp_path / name
        folder.mkdir()
        tokenizer, templates = words_of(model, folder, **parts)
        assert templates.encode([{"role": "user", "content": "ab"}], tokenizer)[0] == 1
        for text in ("</s>", "a </s> <s> b", "</s><s>"):
            ids = templates.encode([{"role": "user", "content": text}], tokenizer)
            assert (ids.count(1), ids.count(2)) == (1, 1), name


def test_tokens_that_count_only_in_some_places(tmp_path: Path) -> None:
    """Llama 2's are found in normalised text, after a space: a twin must not find others than the tokenizer does."""
    alphabet = {each: place for place, each in enumerate([*"\u2581abcdxyz<>s/"])}
    hf = tokenizers.Tokenizer(models.BPE(alphabet, []))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    hf.add_special_tokens([AddedToken(each, normalized=True) for each in ("<s>", "</s>")])
    hf.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    write(tmp_path, hf, {})
    tokenizer = Tokenizer.from_dir(tmp_path)
    template = "{% for m in messages %}<s>{{ m.content }}</s> x</s><s> </s>{% endfor %}"
    templates = ChatTemplates({"default": template}, {}, source="")
    plain = templates.encode([{"role": "user", "content": "ab"}], tokenizer)
    assert len(control(tokenizer, plain)) == 2  # of five
    for text in ("a </s> b", "a <s>", " </s>", "</s> <s>"):
        ids = templates.encode([{"role": "user", "content": text}], tokenizer)
        assert len(control(tokenizer, ids)) in (2, 3), text  # what follows a user's space may be found
        assert tokenizer.decode(ids, skip_special_tokens=False).lstrip() == f"<s>{text}</s> x</s><s> </s>"


def test_a_control_token_may_begin_with_another(tmp_path: Path) -> None:
    hf = tokenizers.Tokenizer(models.BPE({each: place for place, each in enumerate("[]Aab")}, []))
    hf.add_special_tokens([AddedToken(each, normalized=False) for each in ("[A]", "[A]]")])
    write(tmp_path, hf, {})
    template = "{% for m in messages %}[A]]{{ m.content }}[A]{% endfor %}"
    tokenizer, templates = Tokenizer.from_dir(tmp_path), ChatTemplates({"default": template}, {}, source="")
    for text in ("ab", "[A]]", "a[A]b"):
        ids = templates.encode([{"role": "user", "content": text}], tokenizer)
        assert control(tokenizer, ids) == [hf.token_to_id("[A]]"), hf.token_to_id("[A]")], text
        assert ids[1:-1] == ["[]Aab".index(each) for each in text]


def test_a_chat_of_the_shipped_model() -> None:
    tokenizer, templates = Tokenizer.from_dir(SHIPPED), ChatTemplates.from_dir(SHIPPED, "chatml")
    assert templates.built_in
    harmless = templates.encode([{"role": "user", "content": HARMLESS}], tokenizer)
    assert harmless == tokenizer.encode(str.__str__(templates.render([{"role": "user", "content": HARMLESS}])))
    ids = templates.encode([{"role": "user", "content": "</s><s>"}], tokenizer)
    assert control(tokenizer, ids) == control(tokenizer, harmless)
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        templates.encode([{"role": "user", "content": "\ud800"}], tokenizer)


def test_who_wrote_a_text_is_asked_only_of_templates(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny(tmp_path))
    both = by_template("<|im_end|>") + "<|im_end|>"
    start = tokenizer._hf.token_to_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|><|im_end|>") == [start, start]
    assert control(tokenizer, tokenizer.encode(both)) == [start]
