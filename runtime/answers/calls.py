"""The calls of an answer, read in the wire format of the model."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.runtime.answers.answer_output import AnswerOutput
from ingot.runtime.answers.arguments import read_bare_keys, read_parameters, read_python_call
from ingot.runtime.answers.elements import ElementReader
from ingot.runtime.answers.markers import Markers
from ingot.runtime.answers.scanner import Emit, Scanner, Wait, no_text
from ingot.runtime.answers.wire_format import (
    BareKeys,
    Elements,
    JsonArguments,
    JsonCalls,
    Parameters,
    Python,
    WireFormat,
)

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;]{1,256}\Z")
_BEHIND_WHOLE = " \t\r\n;,"

Tools = Mapping[str, Any]
"""Name of a tool → the JSON schema of its parameters."""


class CallReader:
    """Reads the calls of one answer."""

    def __init__(
        self, scanner: Scanner, output: AnswerOutput, markers: Markers, wire: WireFormat, tools: Tools
    ) -> None:
        self._scanner, self._output, self._markers = scanner, output, markers
        self._wire, self._tools = wire, tools
        self._known_only = wire.whole  # what names no tool of the request is no call

    def _coded(self, text: str) -> str:
        return self._markers.coded(text)

    def _coded_all(self, *texts: str) -> list[str]:
        """Without those of white space alone."""
        return [each for text in texts if (each := self._coded(text).strip())]

    def _begin(self, name: str, call_id: str | None = None) -> Emit:
        """It is a call for good."""
        self._scanner.forget()
        return self._output.begin(name, call_id)

    @property
    def openers(self) -> list[str]:
        """What may begin a call, from outside to inside."""
        wire = self._wire
        return self._coded_all(wire.section[0], *(begin for begin, _ in wire.around))

    @property
    def closers(self) -> list[str]:
        """What may end one, from inside to outside."""
        wire = self._wire
        return self._coded_all(*(end for _, end in reversed(wire.around)), wire.section[1])

    def read(self) -> Wait:
        """From an opener on: calls as long as they follow each other. What turns out to be no call is content."""
        scanner, wire = self._scanner, self._wire
        before, taken, opened = self._output.num_calls, False, False
        scanner.keep()
        for opener in self.openers:
            yield from scanner.skip()
            taken = yield from scanner.accept(opener)
            opened = opened or taken
        if isinstance(wire.coding, JsonCalls):
            yield from self._objects(wire, wire.coding)
        elif isinstance(wire.coding, Python):
            yield from self._python(wire)
        elif taken:  # the innermost one, behind which a name stands
            yield from self._call(wire)
        if self._output.num_calls == before:
            self._no_call(opened)
            return
        yield from self._close()

    def _no_call(self, opened: bool) -> None:
        """What was read is content, unless it is the beginning of a call that a limit cut."""
        text = self._markers.plain(self._scanner.take_back())
        if self._scanner.cut and opened:
            self._scanner.drop()
        else:
            self._output.content(text)

    def _close(self) -> Wait:
        for closer in self.closers:
            yield from self._scanner.skip()
            yield from self._scanner.accept(closer)
        yield from self._scanner.skip()

    def read_whole(self) -> Wait:
        """An answer that is calls and nothing else, of tools that the request has."""
        scanner, wire, before = self._scanner, self._wire, self._output.num_calls
        self._known_only, opened = True, False
        scanner.keep()
        for opener in self.openers:
            yield from scanner.skip()
            opened = (yield from scanner.accept(opener)) or opened
        yield from scanner.skip()
        if isinstance(wire.coding, JsonCalls):
            if (yield from scanner.peek()) in ("{", "["):
                yield from self._objects(wire, wire.coding)
        elif (yield from scanner.peek()) == "[":
            yield from self._python(wire)
        self._known_only = wire.whole
        if self._output.num_calls == before:
            self._no_call(opened)

    # One call, or a list of them.

    def _call(self, wire: WireFormat) -> Wait:
        """A name, and arguments behind it."""
        scanner, coded = self._scanner, self._coded
        yield from scanner.skip()
        coding = wire.coding
        after_name = coded(wire.after_name).strip() or "\n"
        first = "{"
        if isinstance(coding, Parameters | Elements):
            first = coded(coding.begin if isinstance(coding, Parameters) else f"{coding.mark}<").strip()
        number_end, id_mark = coded(wire.number_end).strip(), coded(wire.call_id)
        others = [each for each in (number_end, id_mark, first, *self.closers) if each]
        pieces: list[str] = []
        found = yield from scanner.until(list(dict.fromkeys([after_name, *others])), pieces.append)
        written = "".join(pieces).strip()
        name = written.removeprefix(wire.prefix).lstrip(": ")  # of the prefix, where its first token is missing
        if (not found and scanner.cut) or not _NAME.match(name):
            scanner.put_back(found)
            return
        call_id = None
        if found == after_name and number_end:
            number = yield from self._collect([number_end])
            call_id = f"{wire.prefix}{name}{wire.after_name}{number.strip()}" if wire.numbered_ids else None
        elif id_mark and found == id_mark:
            given = (yield from self._collect([after_name])).strip()
            call_id = given if _NAME.match(given) else None
        elif found not in (after_name, number_end):
            scanner.put_back(found)
        emit = self._begin(name, call_id)
        yield from self._arguments(wire, name, emit)

    def _collect(self, ends: Sequence[str]) -> Wait:
        pieces: list[str] = []
        yield from self._scanner.until(ends, pieces.append)
        return "".join(pieces)

    def _arguments(self, wire: WireFormat, name: str, emit: Emit) -> Wait:
        scanner, coding = self._scanner, wire.coding
        if isinstance(coding, Parameters):
            return (yield from read_parameters(scanner, coding, self._coded, self.closers, self._tools.get(name), emit))
        if isinstance(coding, BareKeys):
            return (yield from read_bare_keys(scanner, coding, self._coded, emit))
        if isinstance(coding, Elements):
            reader = ElementReader(scanner, self._coded(coding.mark), coding.item, self.closers)
            return (yield from reader.read(self._tools.get(name), emit))
        assert isinstance(coding, JsonArguments), "all other codings have the name inside"
        yield from scanner.skip()
        before = self._coded(coding.before).strip()
        yield from scanner.accept(before)
        yield from scanner.skip()
        if (yield from scanner.peek()) != "{":
            if not scanner.cut_inside([before, "{"]):
                emit("{}")
            return None
        yield from scanner.json_value(emit)
        yield from scanner.skip()
        yield from scanner.accept(self._coded(coding.after).strip())
        return None

    def _objects(self, wire: WireFormat, coding: JsonCalls) -> Wait:
        """One object, or several: in a list, or with the opener of calls, or semicolons, between them."""
        scanner = self._scanner
        yield from scanner.skip()
        listed = yield from scanner.accept("[")
        while (yield from self._object(wire, coding)):
            yield from scanner.skip(_BEHIND_WHOLE)
            if (yield from scanner.peek()) != "{":
                break
        if listed:
            yield from scanner.skip()
            yield from scanner.accept("]")

    def _object(self, wire: WireFormat, coding: JsonCalls) -> Wait:
        """Whether a call was there, in full. Keys may stand in any order."""
        scanner = self._scanner
        yield from scanner.skip()
        if not (yield from scanner.accept("{")):
            return False
        emit: Emit | None = None
        held: list[str] | None = None
        while True:
            yield from scanner.skip(" \t\r\n,")
            if (yield from scanner.accept("}")):
                break
            key = yield from self._json_text()
            yield from scanner.skip()
            if key is None or not (yield from scanner.accept(":")):
                return False
            yield from scanner.skip()
            if key == coding.name and emit is None:
                name = yield from self._json_text()
                if name is None or not _NAME.match(name) or (self._known_only and name not in self._tools):
                    return False
                emit = self._begin(name)
                if held is not None:
                    emit("".join(held))
            elif key in (coding.arguments, "arguments", "parameters"):
                into: list[str] = []
                whole = yield from self._object_or_text(emit or into.append)
                held = into
                if not whole:
                    return False
            elif self._known_only and emit is None and key != "type":
                return False  # some other JSON
            else:
                yield from scanner.json_value(no_text)
        if emit is not None and held is None:
            emit("{}")
        return emit is not None

    def _object_or_text(self, emit: Emit) -> Wait:
        """Arguments: an object as it comes, also one inside a string; without any: an empty one."""
        scanner = self._scanner
        if (yield from scanner.peek()) == "{":
            return (yield from scanner.json_value(emit))
        pieces: list[str] = []
        whole = yield from scanner.json_value(pieces.append)
        if not whole and scanner.cut:
            return False
        text = "".join(pieces)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        emit(value if isinstance(value, str) and value.lstrip().startswith("{") else "{}" if value is None else text)
        return whole

    def _json_text(self) -> Wait:
        """A string, decoded; None: there is no whole one."""
        pieces: list[str] = []
        if not (yield from self._scanner.json_string(pieces.append)):
            return None
        try:
            return str(json.loads("".join(pieces)))
        except ValueError:
            return None

    def _python(self, wire: WireFormat) -> Wait:
        """Calls, in a list or one behind the other."""
        scanner = self._scanner
        yield from scanner.skip()
        yield from scanner.accept("[")
        while (yield from scanner.peek()) not in ("", "]"):
            for closer in self.closers:
                if (yield from scanner.follows(closer)):
                    return
            read = yield from read_python_call(scanner)
            if read is None or (self._known_only and read[0] not in self._tools):
                return
            self._begin(read[0])(read[1])
            yield from scanner.skip(_BEHIND_WHOLE)
        yield from scanner.accept("]")
