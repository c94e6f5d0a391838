"""What an answer grows by: content, reasoning, calls and their arguments; and the answer that they add up to."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """Text that the model thinks."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallBegin:
    """The index-th call of the answer begins; call_id: one of its own."""

    index: int
    call_id: str
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallArguments:
    """The JSON text of its arguments goes on."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call in full. arguments: JSON text, whole unless the answer was cut."""

    call_id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """content, reasoning: None where there is no text."""

    content: str | None
    reasoning: str | None
    calls: tuple[ToolCall, ...]


class AnswerBuilder:
    """Deltas, added up."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add more."""
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, CallBegin):
                self._calls.append((delta, []))
            else:
                self._calls[delta.index][1].append(delta.text)

    def answer(self) -> Answer:
        """So far."""
        return Answer(
            content="".join(self._content) or None,
            reasoning="".join(self._reasoning) or None,
            calls=tuple(
                ToolCall(call_id=begin.call_id, name=begin.name, arguments="".join(pieces))
                for begin, pieces in self._calls
            ),
        )


def joined(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """Neighbours of one kind in one piece, and nothing that is empty."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, CallBegin):
            found.append(delta)
        elif not delta.text:
            continue
        elif isinstance(last, Content | Reasoning | CallArguments) and _goes_on(last, delta):
            found[-1] = dataclasses.replace(last, text=last.text + delta.text)
        else:
            found.append(delta)
    return tuple(found)


def _goes_on(last: Delta, delta: Delta) -> bool:
    return type(last) is type(delta) and getattr(last, "index", 0) == getattr(delta, "index", 0)
