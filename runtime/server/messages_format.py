"""Events of one sequence → the JSON of Anthropic's messages, in pieces or whole."""

import json
from typing import Any

from ingot.runtime.answers.deltas import AnswerBuilder, CallArguments, CallBegin, Content, Delta, Reasoning
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.openai_format import Choice, ChunkBuilder, Counts, Json, ResponseHead
from ingot.runtime.text_stream import TextEvent

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {408: "timeout_error", 429: "rate_limit_error", 503: "overloaded_error"}


class MessagesChunkBuilder(ChunkBuilder):
    """A message. Blocks: what the model thinks, with_reasoning; what it says, and each call."""

    last = b""

    def __init__(self, head: ResponseHead, *, with_reasoning: bool = True) -> None:
        super().__init__(1, prompt_alone=False)
        self._head, self._with_reasoning = head, with_reasoning
        self._open: str | None = None  # the type of the block that grows
        self._blocks = self._calls = 0
        self._ended = Choice()

    def add(self, choice: int, event: TextEvent) -> int:
        """See ChunkBuilder."""
        size = super().add(choice, event)
        found = self._choices[choice]
        if event.deltas is None and event.text:
            found.deltas.append(Content(text=event.text))
        if not self._with_reasoning:
            found.deltas = [each for each in found.deltas if not isinstance(each, Reasoning)]
        self._calls += sum(isinstance(each, CallBegin) for each in event.deltas or ())
        self._ended.reason, self._ended.stop_reason = found.reason, found.stop_reason
        return size

    def name(self, piece: Json) -> bytes:
        """Its type."""
        return f"event: {piece['type']}\n".encode()

    def failure(self, error: ApiError) -> Json:
        """See ChunkBuilder."""
        return anthropic_error(error)

    def refusal(self, error: ApiError) -> Json:
        """See ChunkBuilder."""
        return anthropic_error(error)

    def openings(self, counts: Counts) -> list[Json]:
        """See ChunkBuilder."""
        message = self._message([], {**_usage(counts), "output_tokens": 0}, ended=False)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def pieces(self, choice: int) -> list[Json]:
        """See ChunkBuilder."""
        found = self._choices[choice]
        self._choices[choice] = Choice()
        return [piece for each in found.deltas for piece in self._delta(each)]

    def endings(self, counts: Counts) -> list[Json]:
        """See ChunkBuilder."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage(counts)},
            {"type": "message_stop"},
        ]

    def whole(self, counts: Counts) -> Json:
        """See ChunkBuilder."""
        built = AnswerBuilder()
        built.add(self._choices[0].deltas)
        answer = built.answer()
        blocks: list[Json] = []
        if answer.reasoning is not None:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content is not None:
            blocks.append({"type": "text", "text": answer.content})
        blocks += [
            {"type": "tool_use", "id": each.call_id, "name": each.name, "input": _object(each.arguments)}
            for each in answer.calls
        ]
        return self._message(blocks, _usage(counts), ended=True)

    def _message(self, blocks: list[Json], counts: Json, *, ended: bool) -> Json:
        return {
            "id": self._head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            "stop_reason": self._stop_reason if ended else None,
            "stop_sequence": self._stop_sequence if ended else None,
            "usage": counts,
        }

    @property
    def _stop_reason(self) -> str:
        if self._ended.reason == "length":
            return "max_tokens"
        return "tool_use" if self._calls else "end_turn" if self._stop_sequence is None else "stop_sequence"

    @property
    def _stop_sequence(self) -> str | None:
        found = self._ended.stop_reason
        return found if isinstance(found, str) else None

    def _delta(self, delta: Delta) -> list[Json]:
        if isinstance(delta, CallBegin):
            block: Json = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
            return self._begin(block)
        if isinstance(delta, CallArguments):
            return [self._more({"type": "input_json_delta", "partial_json": delta.text})]
        if isinstance(delta, Reasoning):
            opened = self._open == "thinking"
            opening = [] if opened else self._begin({"type": "thinking", "thinking": "", "signature": ""})
            return [*opening, self._more({"type": "thinking_delta", "thinking": delta.text})]
        opening = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
        return [*opening, self._more({"type": "text_delta", "text": delta.text})]

    def _begin(self, block: Json) -> list[Json]:
        closing = self._close()
        self._open = block["type"]
        self._blocks += 1
        return [*closing, {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _more(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._blocks - 1}]


def anthropic_error(error: ApiError) -> Json:
    """An error as Anthropic's clients read it, with OpenAI's names of field and cause beside it."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": told}


def _usage(counts: Counts) -> Json:
    """Prompt tokens that the prefix cache gave are counted apart."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.generated,
    }


def _object(text: str) -> Any:
    """Arguments as a value; of a call that was cut: none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
