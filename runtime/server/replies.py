"""Events of sequences → the JSON of OpenAI's answers, in pieces or whole. A choice is one sequence of one prompt."""

import codecs
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ingot.runtime.logprobs import Logprob, LogprobTable
from ingot.runtime.text_stream import TextEvent
from ingot.runtime.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What every piece of an answer repeats."""

    answer_id: str
    created: int
    model: str
    fingerprint: str

    def json(self, kind: str) -> Json:
        """The fields, with `object`."""
        return {
            "id": self.answer_id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint,
        }  # fmt: skip


def usage(prompt_tokens: int, cached_tokens: int, generated: int) -> Json:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }  # fmt: skip


@dataclasses.dataclass(kw_only=True, slots=True)
class Choice:
    """One sequence as it grows: what came since it was written last."""

    pieces: list[str] = dataclasses.field(default_factory=list)
    tables: list[LogprobTable | None] = dataclasses.field(default_factory=list)
    reason: str | None = None

    def take(self, event: TextEvent) -> None:
        """Add an event. An end token is no text, and has no place among the tokens of the text."""
        self.pieces.append(event.text)
        tables = event.logprobs or ()
        self.tables += tables[:-1] if event.end_token else tables
        self.reason = None if event.finish_reason is None else event.finish_reason.value


class Writer(ABC):
    """One answer. Feed it events; then take pieces as they come, or the whole at the end."""

    def __init__(self, choices: int) -> None:
        self._choices = [Choice() for _ in range(choices)]

    def take(self, choice: int, event: TextEvent) -> None:
        """Add an event."""
        self._choices[choice].take(event)

    def openings(self) -> list[Json]:
        """What a stream says before its first piece."""
        return []

    def piece(self, choice: int) -> Json | None:
        """What a choice has to say since the last piece; None: nothing."""
        each = self._choices[choice]
        if not (any(each.pieces) or each.tables or each.reason):
            return None
        self._choices[choice] = Choice()
        return {**self.chunk(), "choices": [self.part(choice, each)]}

    def ending(self, counts: Json) -> Json:
        """The counts, after the last piece of a stream."""
        return {**self.chunk(), "choices": [], "usage": counts}

    @abstractmethod
    def chunk(self) -> Json:
        """What every piece repeats."""

    @abstractmethod
    def part(self, index: int, choice: Choice) -> Json:
        """A choice in a piece."""

    @abstractmethod
    def whole(self, counts: Json) -> tuple[Json, Iterator[Json]]:
        """The answer in one piece, without its choices; and these, one by one."""


class ChatWriter(Writer):
    """chat.completion, or pieces of it; top_logprobs None: without logprobs."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, choices: int, top_logprobs: int | None, *, with_usage: bool = False
    ) -> None:
        super().__init__(choices)
        self._head, self._tokenizer, self._top = head, tokenizer, top_logprobs
        self._chunk = head.json("chat.completion.chunk") | ({"usage": None} if with_usage else {})

    def openings(self) -> list[Json]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            {**self._chunk, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for index in range(len(self._choices))
        ]

    def chunk(self) -> Json:
        return self._chunk

    def part(self, index: int, choice: Choice) -> Json:
        text = "".join(choice.pieces)
        return {
            "index": index, "delta": {"content": text} if text else {}, "logprobs": self._logprobs(choice.tables),
            "finish_reason": choice.reason,
        }  # fmt: skip

    def whole(self, counts: Json) -> tuple[Json, Iterator[Json]]:
        choices = (
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(each.pieces), "refusal": None},
                "logprobs": self._logprobs(each.tables),
                "finish_reason": each.reason,
            }
            for index, each in enumerate(self._choices)
        )
        return {**self._head.json("chat.completion"), "usage": counts}, choices

    def _logprobs(self, tables: Iterable[LogprobTable | None]) -> Json | None:
        if self._top is None:
            return None
        content = []
        for table in tables:
            assert table is not None, "only the first token of a prompt has no probability"
            token, actual = next(iter(table.items()))
            best = sorted(table.items(), key=lambda pair: pair[1].rank)[: self._top]
            content.append({**self._entry(token, actual), "top_logprobs": [self._entry(*pair) for pair in best]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: Logprob) -> Json:
        data = list(self._tokenizer.token_bytes(token))
        return {"token": logprob.decoded, "logprob": logprob.logprob, "bytes": data}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt that its completions repeat. alone: nothing else was asked for."""

    text: str
    token_ids: Sequence[int]
    alone: bool


class CompletionWriter(Writer):
    """text_completion, whole or in pieces. n: choices of a prompt; echoes: one per prompt, or none."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        choices: int,
        *,
        n: int,
        logprobs: bool,
        skip_special_tokens: bool = True,
        with_usage: bool = False,
        echoes: Sequence[Echo] = (),
    ) -> None:
        super().__init__(choices)
        self._tokenizer, self._with_logprobs, self._skip = tokenizer, logprobs, skip_special_tokens
        self._head = head.json("text_completion")
        self._chunk = self._head | ({"usage": None} if with_usage else {})
        self._n, self._echoes = n, list(echoes)
        self._prompt_tables: dict[int, tuple[LogprobTable | None, ...]] = {}  # by prompt
        self._begun: set[int] = set()  # choices that have their echo
        self._written: set[int] = set()  # choices whose probabilities have begun
        self._offsets = [0] * choices  # characters so far
        # bytes of a character that is not whole yet
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(choices)]

    def take(self, choice: int, event: TextEvent) -> None:
        """Only the first sequence of a prompt brings the probabilities of the prompt."""
        if event.prompt_logprobs is not None:
            self._prompt_tables[event.index] = event.prompt_logprobs
        echo = self._echoes[choice // self._n] if self._echoes else None
        if echo is not None and choice not in self._begun:
            self._begun.add(choice)
            self._choices[choice].pieces.append(echo.text)
        if echo is None or not echo.alone:
            super().take(choice, event)
        elif event.finish_reason is not None:
            self._choices[choice].reason = "length"

    def chunk(self) -> Json:
        return self._chunk

    def part(self, index: int, choice: Choice) -> Json:
        return {
            "index": index, "text": "".join(choice.pieces), "finish_reason": choice.reason,
            "logprobs": self._logprobs(index, choice.tables) if self._with_logprobs else None,
        }  # fmt: skip

    def whole(self, counts: Json) -> tuple[Json, Iterator[Json]]:
        return {**self._head, "usage": counts}, (self.part(index, each) for index, each in enumerate(self._choices))

    def _logprobs(self, index: int, tables: Sequence[LogprobTable | None]) -> Json:
        found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        before = () if index in self._written else self._prompt_tables.get(index // self._n, ())
        self._written.add(index)
        for table in (*before, *tables):
            if table is None:
                token = self._echoes[index // self._n].token_ids[0]
                text, log_prob, best = self._tokenizer.decode([token], skip_special_tokens=False), None, None
            else:
                token, actual = next(iter(table.items()))
                text, log_prob = actual.decoded or "", actual.logprob
                best = {entry.decoded: entry.logprob for entry in reversed(table.values())}
            found["text_offset"].append(self._offsets[index])
            found["token_logprobs"].append(log_prob)
            found["tokens"].append(text)
            found["top_logprobs"].append(best)
            if not (self._skip and token in self._tokenizer.special_ids):
                self._offsets[index] += self._length(index, token)
        return found

    def _length(self, index: int, token: int) -> int:
        """Characters that a token completes. The first word of a text has no space before it in some tokenizers."""
        added = self._decoders[index].decode(self._tokenizer.token_bytes(token))
        at_the_start = bool(self._echoes) and self._offsets[index] == 0
        is_bare = at_the_start and not self._echoes[index // self._n].text.startswith(added)
        return len(added.removeprefix(" ") if is_bare else added)
