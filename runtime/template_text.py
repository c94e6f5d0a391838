"""Text that knows which of its characters a chat template wrote; all others came from somebody else.

    '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>'
     tttttttttttt     tttt           tt     ............      tttttttttt      t: the template wrote it

What templates do to text keeps the marks: adding, cutting, splitting, replacing, joining, changing case. Where an
operation is not known here, its result is ordinary `str`, which nobody's template wrote: a mark may be lost, and is
never made up.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from markupsafe import Markup, escape

_OURS, _THEIRS = "t", "."


class TemplateText(str):
    """`str` in everything that a template can see. marks: one character per character, "t" or "."."""

    __slots__ = ("_marks",)  # templates see no name that begins with _

    _marks: str

    def __new__(cls, text: str, marks: str | None = None) -> "TemplateText":
        """Without marks: text of somebody else."""
        self = super().__new__(cls, text)
        self._marks = _THEIRS * len(text) if marks is None else marks
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "TemplateText":
        return TemplateText(super().__getitem__(key), self._marks[key])

    def __iter__(self) -> Iterator["TemplateText"]:
        return (self[place] for place in range(len(self)))

    def __add__(self, other: str) -> str:
        if isinstance(other, Markup):
            return escaped(concatenate((as_html(self), other)))
        return concatenate((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "TemplateText":
        return concatenate((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TemplateText":
        return TemplateText(super().__mul__(count), self._marks * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        """Knows %s."""
        plain, parts = super().__mod__(values), self.split("%s")
        if self.count("%") != len(parts) - 1 or isinstance(values, Mapping):
            return plain
        each = values if isinstance(values, tuple) else (values,)
        return concatenate(piece for pair in zip(parts, (*each, ""), strict=True) for piece in map(str, pair))

    def join(self, parts: Iterable[str]) -> "TemplateText":
        """See str, as with all that follow."""
        parts = list(parts)
        return TemplateText(super().join(parts), self._marks.join(map(_marks, parts)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if old not in self:
            return self
        return TemplateText(new, _marks(new)).join(self.split(old, count)) if old else super().replace(old, new, count)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._cut(super().splitlines(True), "")
        return (
            whole if keepends else [line[: len(kept)] for line, kept in zip(whole, super().splitlines(), strict=True)]
        )

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._around(sep, self.find(sep), missing=len(self))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._around(sep, self.rfind(sep), missing=0)

    def strip(self, chars: str | None = None) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "TemplateText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> "TemplateText":
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> "TemplateText":
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> "TemplateText":
        return self[: len(super().removesuffix(suffix))]

    def upper(self) -> "TemplateText":
        return self._recased(super().upper())

    def lower(self) -> "TemplateText":
        return self._recased(super().lower())

    def capitalize(self) -> "TemplateText":
        return self._recased(super().capitalize())

    def title(self) -> "TemplateText":
        return self._recased(super().title())

    def _recased(self, text: str) -> "TemplateText":
        """Changes of case make text longer or leave every character in its place."""
        return TemplateText(text, self._marks if len(text) == len(self) else None)

    def _cut(self, parts: list[str], sep: str | None) -> list[str]:
        """These parts with their marks; between them stands `sep`, or white space."""
        found: list[str] = []
        place = 0
        for part in parts:
            place = self.find(part, place) if sep is None else place
            found.append(self[place : place + len(part)])
            place += len(part) + len(sep or "")
        return found

    def _around(self, sep: str, place: int, *, missing: int) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        begin, end = (missing, missing) if place < 0 else (place, place + len(sep))
        return self[:begin], self[begin:end], self[end:]


class EscapedText(Markup):
    """Markup of the filters `safe` and `escape`, which escapes for HTML what is added to it. Sums keep the marks."""

    __slots__ = ("_marks",)

    _marks: str

    def __new__(cls, text: object = "", *_: str) -> "EscapedText":
        self = super().__new__(cls, text)
        self._marks = _marks(text) if isinstance(text, str) else _THEIRS * len(self)
        return self

    def __str__(self) -> str:
        return TemplateText(str.__str__(self), self._marks)

    def __add__(self, other: Any) -> "EscapedText":
        return escaped(concatenate((self, as_html(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> "EscapedText":
        return escaped(concatenate((as_html(other), self))) if isinstance(other, str) else NotImplemented


def escaped(text: str) -> EscapedText:
    """Text that is HTML already."""
    return EscapedText(text)


def as_html(value: Any) -> str:
    """HTML of a text, as `escape` of markupsafe makes it; what it does not change keeps its marks."""
    if not isinstance(value, TemplateText):
        return value if isinstance(value, EscapedText) else escape(value)
    text: str = value
    for character in "&<>'\"":
        text = text.replace(character, str(escape(character)))
    return text


def _marks(text: str) -> str:
    return text._marks if isinstance(text, TemplateText | EscapedText) else _THEIRS * len(text)


def by_template(text: str) -> TemplateText:
    """What a template writes."""
    return TemplateText(text, _OURS * len(text))


def plain(text: str) -> str:
    """Without marks."""
    return str.__str__(text)


def concatenate(pieces: Iterable[str]) -> TemplateText:
    """One text of many."""
    return TemplateText("").join(pieces)


def as_content(value: Any) -> Any:
    """Every text in a JSON value as text of somebody else, so that what a template puts into it keeps its marks."""
    if isinstance(value, str):
        return TemplateText(plain(value))
    if isinstance(value, Mapping):
        return {as_content(key): as_content(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_content(each) for each in value)
    return value


def is_by_template(text: str, begin: int, end: int) -> bool:
    """Whether every character of text[begin:end] is the template's; white space around them is nobody's."""
    return _THEIRS not in _marks(text[begin:end].strip())


def stretches(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch that a template wrote."""
    marks, end = _marks(text), 0
    while (begin := marks.find(_OURS, end)) >= 0:
        end = marks.find(_THEIRS, begin)
        end = len(marks) if end < 0 else end
        yield begin, end
