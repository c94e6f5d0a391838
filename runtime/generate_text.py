"""Prompts as text → text, piece by piece, all prompts in flight at once. What `ingot run` is made of."""

import dataclasses
from collections.abc import Generator, Iterable, Sequence

from ingot.configs.sampling import SamplingParams
from ingot.errors import IngotError
from ingot.runtime.admission import make_requests, read_ids
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.tokenizer import Detokenizer, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """prompt: text, or token ids."""

    prompt: str | Sequence[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextEvent:
    """News of one sequence.

    index          of the request in the input
    sequence       0 .. params.n - 1
    text           the next piece; "" while a character is incomplete
    token_ids      tokens since the event before, an end token included
    finish_reason  set in the last event of a sequence
    error          why it failed; then it is the last event too
    """

    index: int
    sequence: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: IngotError | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All events of one sequence put together. finish_reason: "length", "stop" or "abort"."""

    index: int
    sequence: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    error: IngotError | None


class _Stream:
    """One sequence on its way to text."""

    def __init__(self, index: int, sequence: int, request: Request, detokenizer: Detokenizer) -> None:
        self._index, self._sequence, self.request = index, sequence, request
        self._detokenizer = detokenizer
        self._sent = 0
        self.done = False

    def news(self) -> bool:
        return not self.done and (self.request.num_generated > self._sent or self.request.finished)

    def take(self) -> tuple[tuple[int, ...], FinishReason | None]:
        """The new tokens and whether they were the last. Call while no step changes the request."""
        tokens = tuple(self.request.generated()[self._sent :].tolist())
        self._sent += len(tokens)
        return tokens, self.request.finish_reason

    def event(self, tokens: tuple[int, ...], reason: FinishReason | None) -> TextEvent:
        """What `take` gave, with its text."""
        ended_by_token = reason is FinishReason.STOP and tokens[-1] in self.request.end_ids
        text = self._detokenizer.push(tokens[:-1] if ended_by_token else tokens)
        if reason is not None:
            self.done = True
            text += self._detokenizer.finish()
        return TextEvent(
            index=self._index, sequence=self._sequence, text=text, token_ids=tokens, finish_reason=reason,
            error=self.request.error,
        )  # fmt: skip


def stream_text(
    runner: ModelRunner, tokenizer: Tokenizer, requests: Iterable[TextRequest]
) -> Generator[TextEvent, None, None]:
    """Events of all requests, as their steps end. A request that is refused or fails ends in an event with its error,
    and does not touch the others. Dropping the iterator aborts what still runs.
    """
    streams: list[_Stream] = []
    try:
        for index, asked in enumerate(requests):
            try:
                streams += _submit(runner, tokenizer, index, asked)
            except IngotError as error:
                yield TextEvent(index=index, finish_reason=FinishReason.ABORT, error=error)
        while any(not stream.done for stream in streams):
            news = runner.executor.wait(
                lambda: any(stream.news() for stream in streams),
                lambda: [(stream, *stream.take()) for stream in streams if stream.news()],
            )
            for stream, tokens, reason in news:
                yield stream.event(tokens, reason)
    finally:
        runner.executor.abort([stream.request for stream in streams])


def complete_text(runner: ModelRunner, tokenizer: Tokenizer, requests: Iterable[TextRequest]) -> list[Completion]:
    """One Completion per sequence, in the order of the requests."""
    events: dict[tuple[int, int], list[TextEvent]] = {}
    for event in stream_text(runner, tokenizer, requests):
        events.setdefault((event.index, event.sequence), []).append(event)
    return [
        Completion(
            index=index,
            sequence=sequence,
            text="".join(event.text for event in own),
            token_ids=tuple(token for event in own for token in event.token_ids),
            finish_reason=(own[-1].finish_reason or FinishReason.ABORT).value,
            error=own[-1].error,
        )
        for (index, sequence), own in sorted(events.items())
    ]


def _submit(runner: ModelRunner, tokenizer: Tokenizer, index: int, asked: TextRequest) -> list[_Stream]:
    ids = tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
    where = f"prompt {index}"
    prompt = read_ids(ids, runner.facts.vocab_size, where)
    group = make_requests(prompt, asked.params, runner.facts, where=where)
    runner.executor.add(group)
    skip = asked.params.skip_special_tokens
    return [
        _Stream(index, sequence, request, tokenizer.detokenizer(prompt.tolist(), skip_special_tokens=skip))
        for sequence, request in enumerate(group)
    ]
