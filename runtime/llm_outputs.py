"""Events of a request → the result that `LLM` returns, with vLLM's names."""

import dataclasses
from collections.abc import Sequence

from ingot.runtime.answers.deltas import Answer, AnswerBuilder, ToolCall
from ingot.runtime.logprobs import LogprobTable
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream
from ingot.step_io import NO_LOG_PROB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One of the n completions of a prompt.

    token_ids           an end token included
    cumulative_logprob  sum of the log-probabilities of the tokens; None where an engine with a screened lm_head left
                        them out because no logprobs were asked for
    logprobs            one table per token, where asked
    finish_reason       "length", "stop" or "abort"; None while it runs
    stop_reason         the stop text or token that ended it; None for the model's own end tokens
    content, reasoning, tool_calls  what the text of a chat says: None where it has no such part
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobTable] | None
    finish_reason: str | None
    stop_reason: str | int | None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one prompt gave so far.

    prompt           the text, of a chat what its template made; None where token ids were given
    prompt_logprobs  one table per prompt token, None for the first, where asked
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool


class _Part:
    """One completion as it grows."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.logprobs: list[LogprobTable] = []
        self.last: TextEvent | None = None
        self.answer: AnswerBuilder | None = None

    def add(self, event: TextEvent) -> None:
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
        self.log_probs += event.log_probs
        self.logprobs += event.logprobs or ()
        self.last = event
        if event.deltas is not None:
            self.answer = self.answer or AnswerBuilder()
            self.answer.add(event.deltas)

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    def output(self, index: int, *, with_logprobs: bool) -> CompletionOutput:
        reason = None if self.last is None else self.last.finish_reason
        self.pieces = ["".join(self.pieces)]
        text = self.pieces[0]
        answer = Answer(content=text, reasoning=None, calls=()) if self.answer is None else self.answer.answer()
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if NO_LOG_PROB in self.log_probs else sum(self.log_probs),
            logprobs=list(self.logprobs) if with_logprobs else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=None if self.last is None else self.last.stop_reason,
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.calls,
        )


class OutputAccumulator:
    """The events of one prompt, put together."""

    def __init__(self, asked: TextRequest, streams: Sequence[TextStream]) -> None:
        request = streams[0].request
        self._prompt = asked.prompt if isinstance(asked.prompt, str) else asked.shown
        self._prompt_ids: list[int] = request.tokens[: request.num_prompt].tolist()
        self._prompt_logprobs: list[LogprobTable | None] | None = None
        self._with_logprobs = asked.params.logprobs is not None
        self._parts = [_Part() for _ in streams]
        self.finished = False

    def add(self, event: TextEvent) -> None:
        """Add one event."""
        self._parts[event.sequence].add(event)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = list(event.prompt_logprobs)
        self.finished = all(part.finished for part in self._parts)

    def output(self) -> RequestOutput:
        """The result so far."""
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_ids),
            prompt_logprobs=self._prompt_logprobs,
            outputs=[part.output(index, with_logprobs=self._with_logprobs) for index, part in enumerate(self._parts)],
            finished=self.finished,
        )
