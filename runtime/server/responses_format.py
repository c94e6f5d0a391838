"""Events of one sequence → the JSON of OpenAI's responses, in events or whole.

created, in_progress ─▶ for each item: output_item.added ─▶ its deltas ─▶ output_item.done ─▶ completed
"""

import time
from typing import Any

from ingot.runtime.answers.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.openai_format import Choice, ChunkBuilder, Counts, Json, ResponseHead
from ingot.runtime.text_stream import TextEvent

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS: dict[str, Json] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
_NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class ResponsesChunkBuilder(ChunkBuilder):
    """A response. request: what it repeats of its request."""

    last = b""

    def __init__(self, head: ResponseHead, request: Json) -> None:
        super().__init__(1, prompt_alone=False)
        self._head, self._request = head, request
        self._items: list[Json] = []  # finished ones, and the one that grows
        self._text: list[str] = []  # of the one that grows
        self._grows = False
        self._number = 0
        self._reason: str | None = None

    def add(self, choice: int, event: TextEvent) -> int:
        """See ChunkBuilder."""
        size = super().add(choice, event)
        found = self._choices[choice]
        if event.deltas is None and event.text:
            found.deltas.append(Content(text=event.text))
        self._reason = found.reason
        return size

    def name(self, piece: Json) -> bytes:
        """Its type."""
        return f"event: {piece['type']}\n".encode()

    def failure(self, error: ApiError) -> Json:
        """See ChunkBuilder."""
        wrong = {"code": error.code or error.kind, "message": error.message}
        return self._event("failed", response=self._response("failed", None, error=wrong))

    def openings(self, counts: Counts) -> list[Json]:
        """See ChunkBuilder."""
        begun = self._response("in_progress", None)
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def pieces(self, choice: int) -> list[Json]:
        """See ChunkBuilder."""
        found = self._choices[choice]
        self._choices[choice] = Choice()
        return [piece for each in found.deltas for piece in self._delta(each)]

    def endings(self, counts: Counts) -> list[Json]:
        """See ChunkBuilder."""
        status = self._status
        return [*self._close(status), self._event(status, response=self._response(status, counts))]

    def whole(self, counts: Counts) -> Json:
        """See ChunkBuilder."""
        self.pieces(0)
        self._close(self._status)
        return self._response(self._status, counts)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, event: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{event}", "sequence_number": self._number - 1, **fields}

    def _response(self, status: str, counts: Counts | None, error: Json | None = None) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._head.answer_id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._head.model,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": cut,
            "output": list(self._items),
            "usage": None if counts is None else _usage(counts),
            **self._request,
        }

    def _delta(self, delta: Delta) -> list[Json]:
        if isinstance(delta, CallBegin):
            return self._begin("function_call", call_id=delta.call_id, name=delta.name, arguments="")
        kind = {Content: "message", Reasoning: "reasoning", CallArguments: "function_call"}[type(delta)]
        opening: list[Json] = []
        if not self._grows or self._items[-1]["type"] != kind:
            fields: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            opening = self._begin(kind, content=[], **fields)
        self._text.append(delta.text)
        more: Json = {"logprobs": []} if kind == "message" else {}
        return [*opening, self._of_item(f"{_NAMES[kind]}.delta", delta=delta.text, **more)]

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        """Another item, behind the one that grew."""
        closing = self._close("completed")
        number = len(self._items)
        item_id = f"{_PREFIXES[kind]}_{self._head.answer_id.partition('-')[2]}{number:02d}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._text, self._grows = [], True
        added = self._event("output_item.added", output_index=number, item=dict(self._items[-1]))
        part = [self._of_item("content_part.added", part=_PARTS[kind])] if kind in _PARTS else []
        return [*closing, added, *part]

    def _of_item(self, event: str, **fields: Any) -> Json:
        """An event of the item that grows."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        content = {} if self._items[-1]["type"] == "function_call" else {"content_index": 0}
        return self._event(event, **place, **content, **fields)

    def _close(self, status: str) -> list[Json]:
        if not self._grows:
            return []
        self._grows = False
        item, text = self._items[-1], "".join(self._text)
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            done = [self._of_item("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = {**_PARTS[kind], "text": text}
            item["content"] = [part]
            more: Json = {"logprobs": []} if kind == "message" else {}
            done = [
                self._of_item(f"{_NAMES[kind]}.done", text=text, **more),
                self._of_item("content_part.done", part=part),
            ]
        return [*done, self._event("output_item.done", output_index=len(self._items) - 1, item=dict(item))]


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }
