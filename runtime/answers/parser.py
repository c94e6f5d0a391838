"""The tokens of an answer → its deltas, by the wire formats of the model. One for each sequence.

    push("I look. ") push(<tool_call>) push('\\n{"name": "now", "argu')      Content("I look."), CallBegin(0, id, "now")

What has no call and no reasoning in it passes as it is. White space next to a call or to reasoning is dropped.
"""

import re
from collections.abc import Callable

from ingot.runtime.answers.answer_output import AnswerOutput
from ingot.runtime.answers.calls import CallReader, Tools
from ingot.runtime.answers.deltas import Delta
from ingot.runtime.answers.markers import Markers
from ingot.runtime.answers.scanner import Scanner, Wait
from ingot.runtime.answers.wire_format import Harmony, ReasoningFormat, WireFormat


class AnswerParser:
    """Feed it text and marks; take deltas. For one thread at a time.

    wire, reasoning  None: no calls, or no reasoning, are looked for
    tools     that the request has
    reasons   the prompt ends inside the reasoning
    make_id   gives an id for a call

    marks: token → the character that is pushed for it. reasons: it is inside the reasoning.
    """

    def __init__(
        self,
        markers: Markers,
        wire: WireFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        tools: Tools,
        reasons: bool,
        make_id: Callable[[], str],
    ) -> None:
        self._markers, self._reasoning, self.reasons = markers, reasoning, reasons
        self.marks = markers.characters
        self._scanner, self._output = Scanner(markers.plain), AnswerOutput(make_id)
        self._calls = None if wire is None else CallReader(self._scanner, self._output, markers, wire, tools)
        self._whole = wire is not None and (wire.whole or wire.bare)
        harmony = isinstance(wire and wire.coding, Harmony) or (reasoning is not None and reasoning.name == "harmony")
        self._run = self._messages() if harmony else self._answer()
        self._done = False

    def push(self, text: str) -> None:
        """Text, or the character of a marker."""
        self._scanner.push(text)
        self._go_on()

    def finish(self, *, cut: bool) -> None:
        """The answer is complete. cut: a limit was reached, or a stop text of the client."""
        self._scanner.end(cut=cut)
        self._output.cut = cut
        self._go_on()

    def ends_calls(self, text: str) -> bool:
        """Whether a stop text has what ends a call."""
        return self._calls is not None and any(closer in self._coded(text) for closer in self._calls.closers)

    def drain(self) -> tuple[Delta, ...]:
        """What is certain since the last time."""
        return self._output.drain()

    def _go_on(self) -> None:
        if not self._done:
            self._done = next(self._run, True) is True

    def _coded(self, text: str) -> str:
        return self._markers.coded(text)

    def _coded_all(self, *texts: str) -> list[str]:
        """Without those of white space alone."""
        return [each for text in texts if (each := self._coded(text).strip())]

    def _answer(self) -> Wait:
        scanner, form = self._scanner, self._reasoning
        if form is not None:
            begins = self.reasons
            if not begins:
                space = yield from scanner.skip()
                begins = yield from scanner.accept(self._coded(form.begin).strip())
                self._output.space = "" if begins else space
            if begins:
                yield from self._read_reasoning(form)
        if self._calls is not None and self._whole:
            yield from self._calls.read_whole()
        yield from self._text()
        self._output.end()

    def _read_reasoning(self, form: ReasoningFormat) -> Wait:
        """Up to its end, without white space around it."""
        scanner, self.reasons = self._scanner, True
        yield from scanner.skip()
        end, waiting = self._coded(form.end).strip(), ""

        def emit(text: str) -> None:
            nonlocal waiting
            kept = (waiting + text).rstrip()
            waiting = (waiting + text)[len(kept) :]
            self._output.reason(kept)

        openers = [] if self._calls is None else self._calls.openers
        found = yield from scanner.until([end, *filter(_has_token, openers)], emit)  # some call without an end
        self.reasons = False
        if found != end:
            scanner.put_back(found)
        yield from scanner.skip()

    def _text(self) -> Wait:
        """Content up to the end, and the calls in it."""
        scanner, form, calls, output = self._scanner, self._reasoning, self._calls, self._output
        openers, closers = ([], []) if calls is None else (calls.openers, calls.closers)
        thinks = [] if form is None else [each for each in self._coded_all(form.begin, form.end) if _is_token(each)]
        dropped = [] if form is None else self._coded_all(*form.answer, form.rest)
        while True:
            strays = [*(closers if output.num_calls else ()), *self._markers.special]
            found = yield from scanner.until([*openers, *strays, *thinks, *dropped], output.content)
            if not found:
                return
            if calls is not None and found in openers:
                scanner.put_back(found)
                yield from calls.read()
            elif form is not None and thinks and found == thinks[0] and len(thinks) == 2:
                yield from self._read_reasoning(form)
            elif found in dropped:
                output.space = ""
                yield from scanner.skip()

    def _messages(self) -> Wait:
        """<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}<|call|>, again and again."""
        scanner, coded = self._scanner, self._coded
        message, start, channel = coded("<|message|>"), coded("<|start|>"), re.escape(coded("<|channel|>"))
        stops = [coded(each) for each in ("<|end|>", "<|call|>", "<|return|>")]
        while (yield from scanner.peek()):
            pieces: list[str] = []
            found = yield from scanner.until([message, *stops], pieces.append)
            head = coded("".join(pieces))
            named, recipient = re.search(rf"{channel}\s*(\w+)", head), re.search(r"to=(?:functions\.)?([\w.-]+)", head)
            if found != message:
                if not named and not (scanner.cut and head.lstrip().startswith((start, coded("<|channel|>")))):
                    self._output.content(self._markers.plain(head))
                continue
            if recipient and self._calls is not None:
                emit = self._output.begin(recipient[1])
            else:
                emit = self._output.reason if named and named[1] == "analysis" else self._output.content
            self.reasons = emit == self._output.reason
            yield from scanner.until([*stops, start], emit, certain_only=bool(recipient))
            self.reasons = False
        self._output.end()


def _has_token(coded: str) -> bool:
    return any("\ud800" <= each <= "\udfff" for each in coded)


def _is_token(coded: str) -> bool:
    return len(coded) == 1 and "\ud800" <= coded <= "\udfff"
