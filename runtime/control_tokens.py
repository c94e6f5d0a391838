"""Template text → token ids, in which only what the template wrote becomes a control token.

First the tokenizer itself encodes the text: where every control token that it found is the template's, these are the
ids, exactly those of transformers. Else a twin of the tokenizer does it, which knows each control token under a secret
name, drawn when the twin is made, and by no other: the template's tokens are renamed, and nobody else can name one.

    <|im_start|>user\\nsay <|im_end|>!<|im_end|>        the second of three is somebody else's
    ◆1user\\nsay <|im_end|>!◆2                          so the twin finds two
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ingot.errors import RequestError
from ingot.runtime.template_text import TemplateText, is_by_template, plain, stretches

_PRIVATE = range(0x100000, 0x10FFFE)  # characters without meaning, which no normaliser changes
_BRACKETS = re.compile(r"[<>\[\]{}|\uff5c]")
_HTML = re.compile(
    r"</?(a|b|blockquote|body|br|caption|code|d[dlt]|div|em|h[1-6r]|head|html|i|img|li|[ou]l|p|pre|span|strong|su[bp]|"
    r"table|tbody|t[dhr]|tfoot|thead|title|u)/?>"
)


def is_control(token: tokenizers.AddedToken) -> bool:
    """Whether an added token steers a model: those that say so, and marks in brackets such as <think> and <tool_call>.
    Words, white space and tags of HTML are content, which some tokenizers have among their added tokens."""
    text = token.content.strip(" \t\r\n\u2581")
    return text != "" and (token.special or (bool(_BRACKETS.search(text)) and not _HTML.fullmatch(text)))


class ControlTokens:
    """The control tokens of a tokenizer, and its twin. Thread-safe."""

    def __init__(self, hf: tokenizers.Tokenizer) -> None:
        self._hf = hf
        added = hf.get_added_tokens_decoder()
        self._texts = {number: token.content for number, token in added.items() if is_control(token)}
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(8))
        self._names = {text: f"{secret}{chr(0xF0000 + place)}" for place, text in enumerate(self._texts.values())}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        model = hf.model
        self._twin, self._numbers = self._make_twin(model, added)
        if any(
            model.token_to_id(text) == number and self._spells(text, number) for number, text in self._texts.items()
        ):
            self._twin, self._numbers = self._make_twin(_renamed(hf, self._names), added)

    def encode(self, text: TemplateText, *, add_special_tokens: bool) -> list[int]:
        """What the post-processor of the tokenizer adds is its own, as ever. Raises RequestError."""
        encoding = encode_one(self._hf, text, add_special_tokens=add_special_tokens)
        ids = list(encoding.ids)
        added = encoding.special_tokens_mask if add_special_tokens else [0] * len(ids)
        found = (place for place, number in enumerate(ids) if number in self._texts and not added[place])
        spans = filter(None, map(encoding.token_to_chars, found))
        if all(is_by_template(text, begin, end) for begin, end in spans):
            return ids
        places = [match.span() for begin, end in stretches(text) for match in self._pattern.finditer(text, begin, end)]
        renamed, begins = self._rename(text, places)
        encoding = encode_one(self._twin, renamed, add_special_tokens=add_special_tokens)
        seen = self._seen(renamed, encoding)
        if not seen.issuperset(begins):  # some tokens count only where they stand by themselves: here they are text
            places = [place for place, begin in zip(places, begins, strict=True) if begin in seen]
            encoding = encode_one(self._twin, self._rename(text, places)[0], add_special_tokens=add_special_tokens)
        return [self._numbers.get(number, number) for number in encoding.ids]

    def _rename(self, text: str, places: Sequence[tuple[int, int]]) -> tuple[str, list[int]]:
        """The text with secret names at these places, and where the names begin in it."""
        whole = plain(text)
        pieces, begins, length, end = [], [], 0, 0
        for begin, stop in places:
            name = self._names[whole[begin:stop]]
            begins.append(length + begin - end)
            pieces += [whole[end:begin], name]
            length += begin - end + len(name)
            end = stop
        return "".join([*pieces, whole[end:]]), begins

    def _seen(self, text: str, encoding: tokenizers.Encoding) -> set[int]:
        """Where the twin found a name; white space before it may belong to the token."""
        spans = [
            encoding.token_to_chars(place)
            for place, number in enumerate(encoding.ids)
            if self._numbers.get(number) in self._texts
        ]
        return {end - len(text[begin:end].lstrip()) for begin, end in filter(None, spans)}

    def _make_twin(
        self, model: Any, added: Mapping[int, tokenizers.AddedToken]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Shares model and rules with the tokenizer; and the twin's numbers of added tokens → the tokenizer's."""
        twin = tokenizers.Tokenizer(model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(self._hf, part) is not None:
                setattr(twin, part, getattr(self._hf, part))
        numbers = {}
        for number, token in added.items():
            name = self._names[token.content] if number in self._texts else token.content
            same = tokenizers.AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            twin.add_tokens([same])
            known = twin.token_to_id(name)
            assert known is not None, "an added token has a number"
            numbers[known] = number
        return twin, numbers

    def _spells(self, text: str, number: int) -> bool:
        """Whether the twin's model makes the token of plain text: a vocabulary may hold it as if it were a word."""
        around = (text, f" {text}", f"a{text}a")
        return any(number in encode_one(self._twin, each, add_special_tokens=False).ids for each in around)


def encode_one(hf: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
    """With the places of the tokens. A batch of one: the library's plain `encode` keeps all other threads of Python
    waiting, for seconds at a megabyte."""
    try:
        (encoding,) = hf.encode_batch([text], add_special_tokens=add_special_tokens)
    except Exception as error:  # e.g. a lone surrogate, which has no UTF-8 form
        raise RequestError("the text cannot be tokenized", got=str(error)) from error
    return encoding


def _renamed(hf: tokenizers.Tokenizer, names: Mapping[str, str]) -> Any:
    """The model with other names in its vocabulary."""
    document = json.loads(hf.to_str())
    model, vocab = document["model"], document["model"]["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    return tokenizers.Tokenizer.from_str(json.dumps({**document, "added_tokens": []})).model
