"""The wire formats of calls and of reasoning as data: which texts stand around what. `formats` has the rows.

    section[0]  around[0][0] around[1][0] NAME after_name ARGUMENTS around[1][1] around[0][1]  between  ...  section[1]

A text that is a token of the model is found by its id, and where the model has no such token by its letters. White
space at the ends of these texts is what templates write; a reader takes any.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JsonCalls:
    """Name and arguments are two keys of an object. listed: the objects stand in one list."""

    name: str = "name"
    arguments: str = "arguments"
    listed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JsonArguments:
    """An object behind the name, between two texts."""

    before: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Each argument for itself: begin KEY after_key VALUE end. Strings stand as they are, other values as JSON.

    after_type  where the wire tells the type: begin KEY after_key TYPE after_type VALUE end
    types       what it says of a string, and of all else where it does not name the type
    trim        a line break around the value is not a part of it
    """

    begin: str
    after_key: str
    end: str
    after_type: str = ""
    types: tuple[str, str] = ("string", "")
    trim: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BareKeys:
    """An object whose keys have no quotes, and whose strings stand between two of `quote`."""

    quote: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Each argument is an element that is named after it, and `mark` stands before every tag. Strings stand as they
    are. The fields of an object are elements again, and so are the values of a list, each named `item`."""

    mark: str
    item: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Python:
    """Calls of Python with literals, listed: [f(a='x'), g()]; else one in a line."""

    listed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Harmony:
    """Messages with channels and recipients, gpt-oss's own."""


Coding = JsonCalls | JsonArguments | Parameters | BareKeys | Elements | Python | Harmony


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """How a family of models calls tools.

    signs       texts by which a chat template is known, one tuple of them in full; those of earlier rows come first
    section     around all calls of an answer
    around      around each call, from outside to inside
    prefix      what may stand before a name, and is not a part of it
    after_name  behind the name; "" where the coding has the name
    number_end  where a number stands behind `after_name`: behind the number. Then prefix, name and number are the id
                where `numbered_ids` says so
    call_id     before an id that may stand behind the name
    between     two calls
    whole       calls are all of an answer: it begins with one, or it is text
    bare        the section may be left out where calls are all of an answer
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    coding: Coding
    section: tuple[str, str] = ("", "")
    around: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    after_name: str = ""
    number_end: str = ""
    numbered_ids: bool = False
    call_id: str = ""
    between: str = ""
    whole: bool = False
    bare: bool = False

    @property
    def begin(self) -> str:
        """Before each call."""
        return "".join(begin for begin, _ in self.around)

    @property
    def end(self) -> str:
        """Behind each call."""
        return "".join(end for _, end in reversed(self.around))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """How a family of models thinks before it answers.

    signs   as of WireFormat
    begin   the model writes it, or the prompt ends with it
    answer  around the answer behind it; no part of the answer
    rest    behind all of it; no part of the answer
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    begin: str
    end: str
    answer: tuple[str, str] = ("", "")
    rest: str = ""
