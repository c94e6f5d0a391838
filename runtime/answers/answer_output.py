"""Where the deltas of an answer come together."""

from collections.abc import Callable

from ingot.runtime.answers.deltas import CallArguments, CallBegin, Content, Delta, Reasoning, joined
from ingot.runtime.answers.scanner import Emit


class AnswerOutput:
    """Takes parts of an answer in their order. White space next to a call, or around content beside one, is dropped;
    content before and behind a call has a line break between.

    space      of content, that counts if content follows
    num_calls  that have begun
    cut        a limit was reached: what comes behind a call now has waited, since it may be a part of a mark
    """

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._found: list[Delta] = []
        self.space, self.num_calls, self.cut = "", 0, False
        self._between = ""  # what content begins with, if there is more of it
        self._said = False  # whether there has been some

    def drain(self) -> tuple[Delta, ...]:
        """What has come since the last time."""
        found, self._found = joined(self._found), []
        return found

    def content(self, text: str) -> None:
        """More of it."""
        if self.cut and self.num_calls:
            return
        whole = self.space + text
        kept = whole.rstrip()
        self.space = whole[len(kept) :]
        if kept:
            self._found.append(Content(text=self._between + kept))
            self._between, self._said = "", True

    def reason(self, text: str) -> None:
        """More of the reasoning."""
        self._found.append(Reasoning(text=text))

    def begin(self, name: str, call_id: str | None = None) -> Emit:
        """A call; what is given to the result are its arguments."""
        index = self.num_calls
        self.num_calls += 1
        self.space = ""
        self._between = "\n" if self._said else ""
        self._found.append(CallBegin(index=index, call_id=call_id or self._make_id(), name=name))
        return lambda text: self._found.append(CallArguments(index=index, text=text))

    def end(self) -> None:
        """White space at the end of text without calls is content."""
        if not self.num_calls and self.space:
            self._found.append(Content(text=self.space))
            self.space = ""
