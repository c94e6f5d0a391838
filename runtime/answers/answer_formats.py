"""The formats of one model's answers: found by what its chat templates say, or given by name."""

import dataclasses
import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from ingot.configs.read import nearest
from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError, UsageError
from ingot.runtime.answers.formats import REASONING_FORMATS, WIRE_FORMATS
from ingot.runtime.answers.markers import Markers
from ingot.runtime.answers.parser import AnswerParser
from ingot.runtime.answers.tools import ToolUse
from ingot.runtime.answers.wire_format import (
    BareKeys,
    Elements,
    Harmony,
    JsonArguments,
    Parameters,
    ReasoningFormat,
    WireFormat,
)
from ingot.runtime.request import NO_REASONING, ReasoningRules
from ingot.runtime.tokenizer import Tokenizer

_HARMONY = "<|start|><|channel|><|message|><|constrain|><|end|><|call|><|return|>"
_ID_LETTERS = string.ascii_letters + string.digits
_TAIL = 64  # tokens at the end of a prompt that tell whether it ends inside the reasoning
_BEHIND = 8  # tokens, at most, that a template writes behind reasoning that it has ended for the model

Form = TypeVar("Form", WireFormat, ReasoningFormat)
State = Literal["inside", "closed", "open"]
"""Of the reasoning where a prompt ends: the prompt has begun it; has ended it; says nothing of it."""


def make_call_id() -> str:
    """Nine letters and digits: what the templates of Mistral demand, and all others take."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """wire, reasoning: None where the model has no such thing. Thread-safe."""

    wire: WireFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer
    markers: Markers

    @classmethod
    def find(
        cls, templates: Iterable[str], tokenizer: Tokenizer, tools: str | None = None, reasoning: str | None = None
    ) -> "AnswerFormats":
        """templates: the texts of chat templates. tools, reasoning: names of formats, "none", or None: by the
        templates. Raises UsageError."""
        texts = list(templates)
        wire = _choose(tools, WIRE_FORMATS, texts, "tool_parser")
        thinks = _choose(reasoning, REASONING_FORMATS, texts, "reasoning_parser")
        markers = Markers(tokenizer.control_tokens, _texts(wire, thinks), tokenizer.special_ids)
        return cls(wire=wire, reasoning=thinks, tokenizer=tokenizer, markers=markers)

    @property
    def names(self) -> tuple[str | None, str | None]:
        """Names of the two formats."""
        return _name(self.wire), _name(self.reasoning)

    def reading(self, use: ToolUse) -> "AnswerReading | None":
        """What is looked for in the answers of a request; None: nothing."""
        wire = self.wire if use.callable else None
        return None if wire is None and self.reasoning is None else AnswerReading(formats=self, wire=wire, use=use)

    def state(self, prompt: Sequence[int]) -> State:
        """How a prompt ends. Content of messages cannot make the tokens that say so."""
        form = self.reasoning
        if form is None:
            return "closed"
        begin, end = (self.markers.tokens(text) for text in (form.begin, form.end))
        if begin is not None and end is not None and len(begin) == len(end) == 1:
            places = (place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in (begin[0], end[0]))
            last = next(places, None)
            if last is not None and prompt[last] == begin[0]:
                return "inside"
            return "closed" if last is not None and len(prompt) - last <= _BEHIND else "open"
        text = self.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False).rstrip()
        if text.endswith(form.begin.strip()):
            return "inside"
        ends = [each.strip() for each in (form.end, form.answer[0]) if each.strip()]
        return "closed" if any(text.endswith(each) for each in ends) else "open"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReading:
    """What is looked for in the answers of one request. wire: of its calls; None: there are none."""

    formats: AnswerFormats
    wire: WireFormat | None
    use: ToolUse

    def parser(self, prompt: Sequence[int]) -> AnswerParser:
        """The parser of one answer to a prompt."""
        return AnswerParser(
            self.formats.markers,
            self.wire,
            self.formats.reasoning,
            tools={each.name: each.parameters for each in self.use.tools},
            reasons=self.formats.state(prompt) == "inside",
            make_id=make_call_id,
        )

    def reasoning(self, prompt: Sequence[int], params: SamplingParams) -> ReasoningRules | None:
        """What a session has to know of the reasoning: for a grammar that begins behind it, or a budget. Raises
        RequestError."""
        form, budget = self.formats.reasoning, params.thinking_token_budget
        if form is None or (params.structured_outputs is None and budget is None):
            return None if form is None else NO_REASONING
        harmony = form.name == "harmony"
        if harmony and budget is not None:
            raise RequestError(
                "thinking_token_budget: messages of this model have channels, and none is ended by a token alone",
                hint="say reasoning_effort",
            )
        if harmony and self.use.callable:
            return NO_REASONING  # its grammar knows the channels
        state = self.formats.state(prompt)
        begin, end = self._first_token(form.begin), self._end(form)
        if state == "closed" or (state == "open" and begin is None and budget is None):
            return NO_REASONING  # it does not reason, or its grammar leaves it no way to begin
        if end is None or (state == "open" and begin is None):
            raise RequestError(
                "this model marks its reasoning with text, not with tokens: grammars and budgets cannot follow it",
                hint="turn the reasoning off, or leave structured outputs and thinking_token_budget out",
            )
        return ReasoningRules(end=end, begin=begin if state == "open" and not harmony else None, budget=budget)

    def _first_token(self, text: str) -> int | None:
        """With which a text begins; None: with a letter."""
        numbers = {character: number for number, character in self.formats.markers.characters.items()}
        return numbers.get(self.formats.markers.coded(text)[0])

    def _end(self, form: ReasoningFormat) -> tuple[int, ...] | None:
        """Its tokens; None where letters stand at either end, which may be joined with others."""
        coded = self.formats.markers.coded(form.end.strip())
        marks = self.formats.markers.characters.values()
        if coded[0] not in marks or coded[-1] not in marks:
            return None
        return tuple(self.formats.tokenizer.encode(form.end.strip(), add_special_tokens=False))


def check_formats(tools: str | None, reasoning: str | None) -> None:
    """Raises UsageError for names that `AnswerFormats.find` does not know."""
    _choose(tools, WIRE_FORMATS, (), "tool_parser")
    _choose(reasoning, REASONING_FORMATS, (), "reasoning_parser")


def known_formats(templates: Iterable[str]) -> tuple[str | None, str | None]:
    """The names of the formats that chat templates show, of calls and of reasoning."""
    texts = list(templates)
    return _name(_choose(None, WIRE_FORMATS, texts, "")), _name(_choose(None, REASONING_FORMATS, texts, ""))


def _name(row: WireFormat | ReasoningFormat | None) -> str | None:
    return None if row is None else row.name


def _choose(name: str | None, rows: Sequence[Form], texts: Sequence[str], option: str) -> Form | None:
    if name == "none":
        return None
    if name is None:
        return next((row for row in rows if any(_known_by(row, text) for text in texts)), None)
    for row in rows:
        if row.name == name:
            return row
    raise UsageError(
        "there is no such format",
        where=option,
        expected=", ".join(["none", *(row.name for row in rows)]),
        got=name,
        hint=nearest(name, [row.name for row in rows])
        or "leave it out: the chat template shows the format; docs/how-to/tools.md has a table of models",
    )


def _known_by(row: WireFormat | ReasoningFormat, template: str) -> bool:
    plain = template.replace("\\n", "\n").replace("\\u003c", "<")
    return any(all(sign in plain for sign in signs) for signs in row.signs)


def _texts(wire: WireFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """All texts of the formats in which a token may stand."""
    found: list[str] = []
    if wire is not None:
        found += [*wire.section, wire.begin, wire.end, wire.after_name, wire.number_end, wire.call_id]
        coding = wire.coding
        if isinstance(coding, JsonArguments | Parameters | BareKeys | Elements):
            found += [str(getattr(coding, field.name)) for field in dataclasses.fields(coding)]
        elif isinstance(coding, Harmony):
            found.append(_HARMONY)
    if reasoning is not None:
        found += [reasoning.begin, reasoning.end, *reasoning.answer, reasoning.rest]
        found += [_HARMONY] if reasoning.name == "harmony" else []
    return found
