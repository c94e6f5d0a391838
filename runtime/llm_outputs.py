"""Events of a request → the result that `LLM` returns, with vLLM's names."""

import dataclasses
from collections.abc import Sequence

from ingot.runtime.logprobs import LogprobTable
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One of the n completions of a prompt.

    token_ids           an end token included
    cumulative_logprob  sum of the log-probabilities of the tokens
    logprobs            one table per token, where asked
    finish_reason       "length", "stop" or "abort"; None while it runs
    stop_reason         the stop text or token that ended it; None for the model's own end tokens
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[LogprobTable] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one prompt gave so far.

    prompt           the text, or None where token ids were given
    prompt_logprobs  one table per prompt token, None for the first, where asked
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool


class Gathering:
    """The events of one prompt, put together."""

    def __init__(self, asked: TextRequest, streams: Sequence[TextStream]) -> None:
        request = streams[0].request
        self._prompt = asked.prompt if isinstance(asked.prompt, str) else None
        self._prompt_ids: list[int] = request.tokens[: request.num_prompt].tolist()
        self._prompt_logprobs: list[LogprobTable | None] | None = None
        self._parts = [
            CompletionOutput(
                index=index, text="", token_ids=[], cumulative_logprob=0.0, finish_reason=None, stop_reason=None,
                logprobs=None if asked.params.logprobs is None else [],
            )
            for index in range(len(streams))
        ]  # fmt: skip
        self.finished = False

    def take(self, event: TextEvent) -> None:
        """Add one event."""
        part = self._parts[event.sequence]
        self._parts[event.sequence] = CompletionOutput(
            index=part.index,
            text=part.text + event.text,
            token_ids=[*part.token_ids, *event.token_ids],
            cumulative_logprob=part.cumulative_logprob + sum(event.log_probs),
            logprobs=None if part.logprobs is None else [*part.logprobs, *(event.logprobs or ())],
            finish_reason=event.finish_reason and event.finish_reason.value,
            stop_reason=event.stop_reason,
        )
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = list(event.prompt_logprobs)
        self.finished = all(part.finish_reason for part in self._parts)

    def output(self) -> RequestOutput:
        """The result so far."""
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_ids),
            prompt_logprobs=self._prompt_logprobs,
            outputs=list(self._parts),
            finished=self.finished,
        )
