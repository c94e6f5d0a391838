"""One sequence on its way to text: tokens in, events out, ended early where a stop text appears."""

import dataclasses
from collections.abc import Sequence

from ingot.configs.sampling import SamplingParams
from ingot.errors import IngotError, RequestError
from ingot.runtime.answers.answer_formats import AnswerReading
from ingot.runtime.answers.deltas import Delta
from ingot.runtime.logprobs import LogprobTable, PromptTables, as_tables
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Progress
from ingot.runtime.request import FinishReason, Request, TokenProbs
from ingot.runtime.stop_text import StopText
from ingot.runtime.tokenizer import Tokenizer
from ingot.runtime.validation import make_requests, read_ids, read_priority


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """prompt: text, or token ids. priority, cache_salt: see Request. default_max_tokens: where params.max_tokens is
    None; lowered to what fits; None: as many as fit. shown: the text that token ids were made of, for results.
    keep_last: this many tokens of the prompt at most, the last ones; None: all; -1: as many as the engine takes.
    reading: what is looked for in the answer; None: it is text alone. resumed: tokens of the answer that another server
    has sent: events begin behind them."""

    prompt: str | Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    default_max_tokens: int | None = None
    shown: str | None = None
    keep_last: int | None = None
    reading: AnswerReading | None = None
    resumed: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextEvent:
    """What is new of one sequence, as text.

    index            of the request in the input
    sequence         0 .. params.n - 1
    text             the next piece; "" while a character, or what may be a stop text, is incomplete
    token_ids        tokens since the event before, an end token included
    log_probs        of these tokens
    logprobs         one table per token, where asked
    prompt_logprobs  one table per prompt token, None for the first, where asked: in the first event of sequence 0
    finish_reason    set in the last event of a sequence
    stop_reason      the stop text or token that ended it; None for the model's own end tokens
    end_token        whether the last of token_ids ended the request and is not a part of the text
    num_reasoning    how many of token_ids are reasoning
    deltas           what the text says: content, reasoning, calls; None where nobody looks for these
    error            why it failed; then it is the last event too
    """

    index: int
    sequence: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    logprobs: tuple[LogprobTable, ...] | None = None
    prompt_logprobs: Sequence[LogprobTable | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    end_token: bool = False
    num_reasoning: int = 0
    deltas: tuple[Delta, ...] | None = None
    error: IngotError | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What is new of a request, copied."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    token_probs: tuple[TokenProbs, ...]
    prompt_probs: tuple[TokenProbs, ...]
    reason: FinishReason | None
    failure: IngotError | None


class TextStream:
    """One sequence. `done`: its last event is out."""

    def __init__(self, index: int, sequence: int, asked: TextRequest, request: Request, tokenizer: Tokenizer) -> None:
        self.index, self.sequence, self._params, self.request = index, sequence, asked.params, request
        self._tokenizer = tokenizer
        prompt = request.tokens[: request.num_prompt].tolist()
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=asked.params.skip_special_tokens)
        self._stop = StopText(asked.params.stop_texts, include=asked.params.include_stop_str)
        self._parser = None if asked.reading is None else asked.reading.parser(prompt)
        self._marks = {} if self._parser is None else self._parser.marks
        self._sent = 0
        self.done = False
        self._skip_resumed()

    def _skip_resumed(self) -> None:
        """What another server has sent: texts, markers and stop texts go on from there. Raises RequestError."""
        count = self._sent = self.request.num_resumed
        if not count:
            return
        tokens = tuple(self.request.tokens[self.request.num_prompt : self.request.num_tokens].tolist())
        event = self.event(
            NewTokens(tokens=tokens, log_probs=(), token_probs=(), prompt_probs=(), reason=None, failure=None)
        )
        if event.finish_reason is not None:
            raise RequestError("resume_token_ids: the answer has ended already", got=f"stop text {event.stop_reason!r}")

    def next_event(self, progress: Progress) -> TextEvent:
        """What is new up to there, with its text. What goes wrong with the text of one request ends that request only:
        the event has the error, and `done` is set.
        """
        taken = self.new_tokens(progress)
        try:
            return self.event(taken)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the tokenizer's library is no Exception
            self.done = True
            return self.failed_event(RequestError("the tokens cannot be turned into text", got=repr(error)))

    def failed_event(self, error: IngotError) -> TextEvent:
        """The last one, of a request that has failed."""
        return TextEvent(index=self.index, sequence=self.sequence, finish_reason=FinishReason.ABORT, error=error)

    def new_tokens(self, progress: Progress) -> NewTokens:
        """What is new up to there. Steps may go on meanwhile."""
        request, begin, end = self.request, self._sent, progress.num_generated
        self._sent = end
        return NewTokens(
            tokens=tuple(request.tokens[request.num_prompt + begin : request.num_prompt + end].tolist()),
            log_probs=tuple(request.log_probs[begin - request.num_resumed : end - request.num_resumed]),
            token_probs=tuple(request.token_probs[begin - request.num_resumed : end - request.num_resumed]),
            prompt_probs=tuple(request.prompt_probs) if begin == 0 else (),
            reason=request.finish_reason if progress.ended else None,
            failure=request.failure if progress.ended else None,
        )

    def event(self, news: NewTokens) -> TextEvent:
        """What `new_tokens` gave, with its text. Where a stop text appears, the rest is dropped and `done` is set: the
        caller then aborts the request if it still runs."""
        pieces, count, found, ended, thoughts = [], 0, None, False, 0
        for count, token in enumerate(news.tokens, start=1):
            last = news.reason is FinishReason.STOP and count == len(news.tokens)
            if last and token in self.request.end_ids and not self._params.include_stop_str:
                ended = True  # an end token is no text
                break
            generated = self._sent - len(news.tokens) + count
            text, found = self._read(token, may_stop=generated >= self._params.min_tokens)
            pieces.append(text)
            thoughts += self._parser is not None and self._parser.reasons
            if found is not None:
                break
        reason = FinishReason.STOP if found is not None else news.reason
        if reason is not None and found is None:
            text, found = self._stop.push(self._detokenizer.finish(), may_stop=self._sent >= self._params.min_tokens)
            text += self._stop.finish()
            self._parse(text)
            pieces.append(text)
            reason = FinishReason.STOP if found is not None else reason
        self.done = reason is not None
        failed = news.failure if found is None else None
        stop_token = news.tokens[-1] if news.tokens and found is None and reason is FinishReason.STOP else None
        return TextEvent(
            index=self.index,
            sequence=self.sequence,
            text="".join(pieces),
            token_ids=news.tokens[:count],
            log_probs=news.log_probs[:count],
            logprobs=self._tables(news.token_probs[:count]),
            prompt_logprobs=self._prompt_tables(news),
            finish_reason=reason,
            stop_reason=stop_token if stop_token in self._params.stop_token_ids else found,
            end_token=ended,
            deltas=self._deltas(reason, found),
            num_reasoning=thoughts,
            error=failed,
        )

    def _read(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        """The text that is certain with this token, and the stop text in it. No stop text reaches over a marker."""
        mark = self._marks.get(token)
        if mark is None:
            text, found = self._stop.push(self._detokenizer.push([token]), may_stop=may_stop)
            self._parse(text)
            return text, found
        text, found = self._stop.push(self._detokenizer.mark(token), may_stop=may_stop)
        text += self._stop.finish() if found is None else ""
        self._parse(text)
        if found is not None:
            return text, found
        self._parse(mark)
        hidden = self._params.skip_special_tokens and token in self._tokenizer.special_ids
        return text + ("" if hidden else self._tokenizer.token_text(token)), None

    def _parse(self, text: str) -> None:
        if self._parser is not None and text:
            self._parser.push(text)

    def _deltas(self, reason: FinishReason | None, stop: str | None) -> tuple[Delta, ...] | None:
        """What is new since the event before. stop: the stop text that was found."""
        if self._parser is None:
            return None
        if reason is not None:
            stopped = stop is not None and not self._parser.ends_calls(stop)
            self._parser.finish(cut=stopped or reason is not FinishReason.STOP)
        return self._parser.drain()

    def _tables(self, probs: Sequence[TokenProbs]) -> tuple[LogprobTable, ...] | None:
        return None if self.request.logprobs is None else tuple(as_tables(probs, self._tokenizer.token_text))

    def _prompt_tables(self, news: NewTokens) -> PromptTables | None:
        first = self._sent == len(news.tokens) > 0
        if self.request.prompt_logprobs is None or not first:
            return None
        return PromptTables(news.prompt_probs, self._tokenizer.token_text)


def make_streams(runner: ModelRunner, tokenizer: Tokenizer, index: int, asked: TextRequest) -> list[TextStream]:
    """The streams of one prompt; their requests are not yet added to the executor. Raises RequestError."""
    ids = tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
    if asked.keep_last is not None:
        limits = runner.model_info.limits
        most = min(limits.max_input_len, limits.max_seq_len - 1)
        ids = ids[-(most if asked.keep_last == -1 else asked.keep_last) :]
    where = f"prompt {index}"
    prompt = read_ids(ids, runner.model_info.vocab_size, where)
    resumed = read_ids(asked.resumed, runner.model_info.vocab_size, "resume_token_ids") if len(asked.resumed) else ()
    bad_words = [form for word in asked.params.bad_words or () for form in tokenizer.forms(word)]
    priority, salt = read_priority(asked.priority, asked.cache_salt)
    group = make_requests(
        prompt,
        asked.params,
        runner.model_info,
        where=where,
        default_max_tokens=asked.default_max_tokens,
        bad_words=bad_words,
        priority=priority,
        cache_salt=salt,
        guides=runner.guides,
        reasoning=None if asked.reading is None else asked.reading.reasoning(prompt.tolist(), asked.params),
        resumed=resumed,
    )
    return [TextStream(index, sequence, asked, request, tokenizer) for sequence, request in enumerate(group)]
