"""Prompts as text → text, piece by piece, all prompts in flight at once. What `ingot run` is made of."""

import dataclasses
from collections.abc import Generator, Iterable

from ingot.errors import IngotError
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import FinishReason
from ingot.runtime.step_by_step import StepsAhead
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All events of one sequence put together. finish_reason: "length", "stop" or "abort"."""

    index: int
    sequence: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    error: IngotError | None


def stream_text(
    runner: ModelRunner, tokenizer: Tokenizer, requests: Iterable[TextRequest]
) -> Generator[TextEvent, None, None]:
    """Events of all requests, as their steps end. A request that is refused or fails ends in an event with its error,
    and does not touch the others. Dropping the iterator aborts what still runs.
    """
    streams: list[TextStream] = []
    try:
        for index, asked in enumerate(requests):
            try:
                group = make_streams(runner, tokenizer, index, asked)
                runner.executor.add([stream.request for stream in group])
                streams += group
            except IngotError as error:
                yield TextEvent(index=index, finish_reason=FinishReason.ABORT, error=error)
        with StepsAhead(runner.executor) as ahead:
            while any(not stream.done for stream in streams) and not ahead.failed():
                news = runner.executor.wait(
                    lambda: any(stream.has_news() for stream in streams) or ahead.failed(),
                    lambda: [(stream, stream.take()) for stream in streams if stream.has_news()],
                    steps=False,
                )
                for stream, taken in news:
                    event = stream.event(taken)
                    if stream.done:
                        runner.executor.abort([stream.request])
                    yield event
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
