"""Prompts as text → text, piece by piece, all prompts in flight at once, in the thread of the caller."""

import dataclasses
from collections.abc import Generator, Iterable, Iterator

from ingot.errors import IngotError
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import FinishReason
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
    runner.executor.require_ready()
    outlet = Outlet()
    streams: list[TextStream] = []
    try:
        for index, asked in enumerate(requests):
            try:
                group = make_streams(runner, tokenizer, index, asked)
                runner.executor.add([stream.request for stream in group], outlet)
                streams += group
            except IngotError as error:
                yield TextEvent(index=index, finish_reason=FinishReason.ABORT, error=error)
        yield from read_text(runner, streams, outlet)
    finally:
        runner.executor.abort([stream.request for stream in streams])


def read_text(runner: ModelRunner, streams: Iterable[TextStream], outlet: Outlet) -> Iterator[TextEvent]:
    """What `outlet` tells of requests that were queued with it, as text, until all of them have ended."""
    open_streams = {stream.request: stream for stream in streams}
    while open_streams:
        for progress in outlet.get_all():
            if (stream := open_streams.get(progress.request)) is not None:
                event = stream.next_event(progress)
                if stream.done:
                    del open_streams[progress.request]
                    runner.executor.abort([progress.request])
                yield event


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
