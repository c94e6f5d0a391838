"""Events of sequences → the JSON of OpenAI's chat completions, in pieces or whole."""

from collections.abc import Iterable, Sequence
from typing import Any

from ingot.runtime.answers.deltas import AnswerBuilder, CallArguments, CallBegin, Content, Delta, Reasoning, ToolCall
from ingot.runtime.logprobs import Logprob, LogprobTable
from ingot.runtime.server.json_pieces import Rows
from ingot.runtime.server.openai_format import (
    NO_EXTRAS,
    Choice,
    ChoicesChunkBuilder,
    Counts,
    Extras,
    Json,
    ResponseHead,
    end_of,
    usage,
)
from ingot.runtime.text_stream import TextEvent
from ingot.runtime.tokenizer import Tokenizer


class ChatChunkBuilder(ChoicesChunkBuilder):
    """chat.completion, or pieces of it.

    top_logprobs    None: without logprobs
    with_reasoning  whether the answer says what the model thinks
    named           the request names the tool that is called: then OpenAI's finish_reason is "stop"
    """

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        choices: int,
        top_logprobs: int | None,
        *,
        with_usage: bool = False,
        prompt_alone: bool = False,
        with_reasoning: bool = True,
        named: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        super().__init__(choices, prompt_alone=prompt_alone, with_usage=with_usage, extras=extras)
        if extras.echo:
            for each in self._choices:
                each.pieces.append(extras.echo)
                each.deltas.append(Content(text=extras.echo))
        self._head, self._tokenizer, self._top = head, tokenizer, top_logprobs
        self._with_reasoning, self._named = with_reasoning, named
        self._chunk = head.json("chat.completion.chunk") | ({"usage": None} if with_usage else {})
        self._parsed = False  # whether answers are read for calls and reasoning
        self._callers: set[int] = set()  # choices that have called

    def add(self, choice: int, event: TextEvent) -> int:
        """See ChunkBuilder."""
        if event.deltas is not None:
            self._parsed = True
            if any(isinstance(each, CallBegin) for each in event.deltas):
                self._callers.add(choice)
        return super().add(choice, event)

    def openings(self, counts: Counts) -> list[Json]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        told = self.of_prompt(0, whole=False)
        return [
            {**self._chunk, **told, "choices": [{"index": index, "delta": delta, "logprobs": None, **end_of(Choice())}]}
            for index in range(len(self._choices))
        ]

    def chunk(self) -> Json:
        return self._chunk

    def parts(self, index: int, choice: Choice) -> list[Json]:
        """Never two kinds of deltas in one piece, and none beside the end."""
        end = {**end_of(choice), "finish_reason": self._reason(index, choice)}
        if self._parsed:
            deltas = [found for each in choice.deltas if (found := self._delta(each))]
            waits = not deltas and (choice.tables or (choice.token_ids and self._extras.prompt_token_ids is not None))
            deltas += [{}] if choice.reason is not None or waits else []
        else:
            text = "".join(choice.pieces)
            deltas = [{"content": text} if text else {}]
        parts = [{"index": index, "delta": each, "logprobs": None, **end_of(Choice())} for each in deltas]
        if parts:
            parts[0] |= {"logprobs": self._logprobs(choice.tables), **self.token_ids(choice)}
            parts[-1] |= end
        return parts

    def whole(self, counts: Counts) -> Json:
        choices = (
            {
                "index": index,
                "message": self._message(each),
                **self.token_ids(each),
                "logprobs": self._logprobs(each.tables),
                **end_of(each),
                "finish_reason": self._reason(index, each),
            }
            for index, each in enumerate(self._choices)
        )
        told = self.of_prompt(0, whole=True)
        return {**self._head.json("chat.completion"), **told, "usage": usage(counts), "choices": choices}

    def _message(self, choice: Choice) -> Json:
        if not self._parsed:
            return {"role": "assistant", "content": "".join(choice.pieces), "refusal": None}
        built = AnswerBuilder()
        built.add(choice.deltas)
        answer = built.answer()
        reasoning = answer.reasoning if self._with_reasoning else None
        empty = None if answer.calls or answer.reasoning else ""
        message: Json = {"role": "assistant", "content": answer.content or empty, "refusal": None}
        if reasoning is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if answer.calls:
            message["tool_calls"] = calls_json(answer.calls)
        return message

    def _delta(self, delta: Delta) -> Json | None:
        """As the official client reads it: the index always, name and id once, arguments never null."""
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text, "reasoning": delta.text} if self._with_reasoning else None
        if isinstance(delta, CallArguments):
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}

    def _reason(self, index: int, choice: Choice) -> str | None:
        called = index in self._callers and not self._named
        return "tool_calls" if called and choice.reason == "stop" else choice.reason

    def _logprobs(self, tables: Iterable[LogprobTable | None]) -> Json | None:
        return None if self._top is None else {"content": Rows(map(self._row, tables)), "refusal": None}

    def _row(self, table: LogprobTable | None) -> Json:
        assert table is not None, "only the first token of a prompt has no probability"
        token, actual = next(iter(table.items()))
        best = sorted(table.items(), key=lambda pair: pair[1].rank)[: self._top]
        return {**self._entry(token, actual), "top_logprobs": [self._entry(*pair) for pair in best]}

    def _entry(self, token: int, logprob: Logprob) -> Json:
        data = list(self._tokenizer.token_bytes(token))
        return {"token": logprob.decoded, "logprob": logprob.logprob, "bytes": data}


def calls_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls of a message."""
    return [
        {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in calls
    ]
