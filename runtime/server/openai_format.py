"""Events of sequences → the JSON of OpenAI's answers, in pieces or whole. A choice is one sequence of one prompt."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ingot.runtime.answers.deltas import Delta
from ingot.runtime.logprobs import LogprobTable
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.json_pieces import Rows
from ingot.runtime.server.text_offsets import TextOffsets
from ingot.runtime.text_stream import TextEvent
from ingot.runtime.tokenizer import Tokenizer

Json = dict[str, Any]
_OF_A_TOKEN = 100  # characters of the probabilities of a token, a rough guess


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponseHead:
    """What every piece of an answer repeats."""

    answer_id: str
    created: int
    model: str
    fingerprint: str

    def json(self, kind: str) -> Json:
        """The fields, with `object`."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Tokens of prompts, of them those that the prefix cache gave, generated ones, and of these the reasoning's."""

    prompt: int
    cached: int
    generated: int
    reasoning: int = 0


def usage(counts: Counts) -> Json:
    """Counts of tokens, as OpenAI has them."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


@dataclasses.dataclass(kw_only=True, slots=True)
class Choice:
    """One sequence as it grows: what came since it was written last."""

    pieces: list[str] = dataclasses.field(default_factory=list)
    tables: list[LogprobTable | None] = dataclasses.field(default_factory=list)
    deltas: list[Delta] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: TextEvent) -> None:
        """Add an event. An end token is not text, and has no place among the tokens of the text."""
        self.stop_reason = event.stop_reason
        self.pieces.append(event.text)
        self.deltas += event.deltas or ()
        self.token_ids += event.token_ids
        tables = event.logprobs or ()
        self.tables += tables[:-1] if event.end_token else tables
        self.reason = None if event.finish_reason is None else event.finish_reason.value


def end_of(choice: Choice) -> Json:
    """Why a choice ended: OpenAI's word, and vLLM's stop text or token id where the request named it."""
    return {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What answers have beside OpenAI's fields, with vLLM's names.

    prompt_token_ids  of each prompt, where the request wants token ids; None: it does not
    prompt_logprobs   whether it wants the probabilities of the prompt's tokens
    echo              text of the last message, which the answer goes on from
    """

    prompt_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprobs: bool = False
    echo: str = ""


NO_EXTRAS = Extras()


class ChunkBuilder(ABC):
    """One answer. Feed it events; then take pieces as they come, or the whole at the end. For one thread at a time.

    prompt_alone: nothing but the prompt was asked for; the token that came with it is not a part of the answer.
    with_usage: a stream ends with the counts of tokens. last: what stands behind the last piece of a stream.
    """

    last = b"data: [DONE]\n\n"

    def __init__(
        self, choices: int, *, prompt_alone: bool, with_usage: bool = False, extras: Extras = NO_EXTRAS
    ) -> None:
        self._choices = [Choice() for _ in range(choices)]
        self._prompt_alone, self._with_usage, self._extras = prompt_alone, with_usage, extras
        self._prompt_tables: dict[int, Sequence[LogprobTable | None]] = {}  # by prompt

    def add(self, choice: int, event: TextEvent) -> int:
        """Add an event. Returns about how many characters of JSON it makes. Only the first sequence of a prompt brings
        the probabilities of the prompt."""
        size = 0
        if event.prompt_logprobs is not None:
            self._prompt_tables[event.index] = event.prompt_logprobs
            size += _OF_A_TOKEN * len(event.prompt_logprobs)
        if self._prompt_alone:
            if event.finish_reason is not None:
                self._choices[choice].reason = "length"
            return size
        self._choices[choice].add(event)
        return size + len(event.text) + _OF_A_TOKEN * len(event.logprobs or ())

    def token_ids(self, choice: Choice) -> Json:
        """Those that are new, where wanted."""
        return {} if self._extras.prompt_token_ids is None else {"token_ids": choice.token_ids}

    def of_prompt(self, prompt: int, *, whole: bool) -> Json:
        """What is wanted of a prompt itself. whole: the answer comes in one piece."""
        found: Json = {}
        if self._extras.prompt_token_ids is not None:
            found["prompt_token_ids"] = list(self._extras.prompt_token_ids[prompt])
        if self._extras.prompt_logprobs and whole:
            found["prompt_logprobs"] = Rows(map(_known_row, self._prompt_tables.get(prompt, ())))
        return found

    def openings(self, counts: Counts) -> list[Json]:
        """What a stream says before its first piece."""
        return []

    def name(self, piece: Json) -> bytes:
        """The line that names a piece of a stream; none of OpenAI's has one."""
        return b""

    def failure(self, error: ApiError) -> Json:
        """An error as a piece of a stream that has begun."""
        return error.body()

    def refusal(self, error: ApiError) -> Json:
        """An error in place of the answer."""
        return error.body()

    @abstractmethod
    def pieces(self, choice: int) -> list[Json]:
        """What a choice has to say since the last time."""

    @abstractmethod
    def endings(self, counts: Counts) -> list[Json]:
        """What a stream says when every choice has ended."""

    @abstractmethod
    def whole(self, counts: Counts) -> Json:
        """The answer in one piece, whose parts are made as `json_pieces` writes them."""


class ChoicesChunkBuilder(ChunkBuilder):
    """An answer of several choices: completions and chats."""

    def pieces(self, choice: int) -> list[Json]:
        each = self._choices[choice]
        if not (any(each.pieces) or each.tables or each.deltas or each.reason):
            return []
        self._choices[choice] = Choice()
        return [{**self.chunk(), "choices": iter([part])} for part in self.parts(choice, each)]

    def endings(self, counts: Counts) -> list[Json]:
        return [{**self.chunk(), "choices": [], "usage": usage(counts)}] if self._with_usage else []

    @abstractmethod
    def chunk(self) -> Json:
        """What every piece repeats."""

    @abstractmethod
    def parts(self, index: int, choice: Choice) -> list[Json]:
        """What is new of a choice, each for a piece of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt that its completions repeat."""

    text: str
    token_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Probabilities of tokens, a column for each of OpenAI's lists, and where the text goes on."""

    text_offset: list[int] = dataclasses.field(default_factory=list)
    token_logprobs: list[float | None] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[str | None, float] | None] = dataclasses.field(default_factory=list)
    offsets: TextOffsets

    def add(self, token: int, text: str, log_prob: float | None, best: dict[str | None, float] | None) -> None:
        """A token."""
        self.text_offset.append(self.offsets.place(token))
        self.token_logprobs.append(log_prob)
        self.tokens.append(text)
        self.top_logprobs.append(best)

    def copy(self) -> "Scores":
        """To go on in another way."""
        return Scores(
            text_offset=self.text_offset.copy(),
            token_logprobs=self.token_logprobs.copy(),
            tokens=self.tokens.copy(),
            top_logprobs=self.top_logprobs.copy(),
            offsets=self.offsets.copy(),
        )

    def json(self) -> Json:
        """As OpenAI has them."""
        return {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }


def _known_row(table: LogprobTable | None) -> Json | None:
    """A token of a prompt and the likeliest ones at its place; None for the first."""
    if table is None:
        return None
    return {
        str(token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded}
        for token, each in table.items()
    }


class CompletionChunkBuilder(ChoicesChunkBuilder):
    """text_completion, whole or in pieces. n: choices of a prompt; echoes: one per prompt, or none."""

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        choices: int,
        *,
        n: int,
        logprobs: bool,
        skip_special_tokens: bool = True,
        with_usage: bool = False,
        echoes: Sequence[Echo] = (),
        prompt_alone: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        super().__init__(choices, prompt_alone=prompt_alone, with_usage=with_usage, extras=extras)
        self._tokenizer, self._with_logprobs, self._skip = tokenizer, logprobs, skip_special_tokens
        self._head = head.json("text_completion")
        self._chunk = self._head | ({"usage": None} if with_usage else {})
        self._n, self._echoes = n, list(echoes)
        self._prompt_scores: dict[int, Scores] = {}
        self._begun: set[int] = set()  # choices that have their echo
        self._told: set[int] = set()  # choices that have told of their prompt
        self._offsets: dict[int, TextOffsets] = {}  # of choices whose probabilities have begun

    def add(self, choice: int, event: TextEvent) -> int:
        """See ChunkBuilder."""
        size = 0
        echo = self._echoes[choice // self._n] if self._echoes else None
        if echo is not None and choice not in self._begun:
            self._begun.add(choice)
            self._choices[choice].pieces.append(echo.text)
            size += len(echo.text)
        return size + super().add(choice, event)

    def chunk(self) -> Json:
        return self._chunk

    def parts(self, index: int, choice: Choice) -> list[Json]:
        first = index not in self._told
        self._told.add(index)
        told = self.of_prompt(index // self._n, whole=False) if first else {}
        return [{**self._part(index, choice), **told}]

    def _part(self, index: int, choice: Choice) -> Json:
        return {
            **self.token_ids(choice),
            "index": index,
            "text": "".join(choice.pieces),
            **end_of(choice),
            "logprobs": self._logprobs(index, choice.tables) if self._with_logprobs else None,
        }

    def whole(self, counts: Counts) -> Json:
        choices = (
            {**self._part(index, each), **self.of_prompt(index // self._n, whole=True)}
            for index, each in enumerate(self._choices)
        )
        return {**self._head, "usage": usage(counts), "choices": choices}

    def _logprobs(self, index: int, tables: Sequence[LogprobTable | None]) -> Json:
        offsets = self._offsets.get(index)
        found = self._of_prompt(index // self._n).copy() if offsets is None else Scores(offsets=offsets)
        for table in tables:
            self._add(found, table, index // self._n)
        self._offsets[index] = found.offsets
        return found.json()

    def _of_prompt(self, prompt: int) -> Scores:
        """What all completions of a prompt begin with, made once."""
        if prompt not in self._prompt_scores:
            begins_with = self._echoes[prompt].text if self._echoes else None
            scores = Scores(offsets=TextOffsets(self._tokenizer, begins_with, skip_special_tokens=self._skip))
            for table in self._prompt_tables.get(prompt, ()) if self._echoes else ():
                self._add(scores, table, prompt)
            if begins_with is not None:
                scores.offsets.go_on_after(begins_with)
            self._prompt_scores[prompt] = scores
        return self._prompt_scores[prompt]

    def _add(self, scores: Scores, table: LogprobTable | None, prompt: int) -> None:
        if table is None:
            token = self._echoes[prompt].token_ids[0]
            scores.add(token, self._tokenizer.decode([token], skip_special_tokens=False), None, None)
            return
        token, actual = next(iter(table.items()))
        best = {entry.decoded: entry.logprob for entry in reversed(table.values())}
        scores.add(token, actual.decoded or "", actual.logprob, best)
