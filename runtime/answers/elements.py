"""Arguments as elements, <key>value</key>, a mark before every tag → JSON text, as far as it is certain.

    ]<]minimax[>[<city>Bonn]<]minimax[>[</city>]<]minimax[>[<days>]<]minimax[>[<item>3]<]minimax[>[</item>...

The schema of a tool says what the text of an element is, and whether elements within it are fields or values of a list.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.runtime.answers.arguments import as_json, in_string, types_of
from ingot.runtime.answers.scanner import Emit, Scanner, Wait, no_text
from ingot.runtime.json_pointer import resolved

_DEEPEST = 64  # elements within elements; the tags of more are text
_LONGEST_NAME = 256
_MIXED = "$text"  # the field of text that stands beside elements


class Nested(NamedTuple):
    """An element that holds others. text: what stands between them."""

    children: list[tuple[str, "str | Nested"]]
    text: str


Node = str | Nested


class ElementReader:
    """Reads the arguments of one call. mark: as the scanner has it. stops: what may end the call."""

    def __init__(self, scanner: Scanner, mark: str, item: str, stops: Sequence[str]) -> None:
        self._scanner, self._mark, self._item, self._stops = scanner, mark, item, stops
        self._open = f"{mark}<"
        self._root: object = None

    def read(self, schema: object, emit: Emit) -> Wait:
        """All arguments. schema: of their object. Whether they ended."""
        self._root = schema
        fields = _Fields(emit)
        emit("{")
        while True:
            name = yield from self._next()
            if not name:
                break
            inner = _field(schema, name, self._root)
            if types_of(inner, self._root) == {"string"}:
                begun = fields.begin_text(name)
                if not (yield from self._text([name], schema, begun)):
                    return False
                fields.end_text()
            else:
                node = yield from self._node([name], inner, schema)
                if node is None:
                    fields.flush()
                    return False
                fields.hold(name, self._written(node, inner))
        fields.flush()
        if name is None:
            return False
        emit("}")
        return True

    def _next(self) -> Wait:
        """The name of the next argument; "" where the call ends, None where a limit cut it."""
        while True:
            found = yield from self._scanner.until([self._open, *self._stops], no_text, certain_only=True)
            if found != self._open:
                self._scanner.put_back(found)
                return "" if found or not self._scanner.cut else None
            _, name = yield from self._tag()
            if name and not name.startswith("/"):
                return name

    def _tag(self) -> Wait:
        """(text, name) of a tag behind its "<". Without a name: it is none."""
        scanner, pieces = self._scanner, list[str]()
        while (each := (yield from scanner.peek())) and not _ends_name(each) and len(pieces) < _LONGEST_NAME:
            pieces.append(scanner.one())
        name = "".join(pieces)
        closed = yield from scanner.accept(">")
        return (f"{name}>", name.strip()) if closed else (name, "")

    def _ends(self, path: Sequence[str]) -> list[str]:
        return [f"{self._mark}</{path[-1]}>", *self._stops, self._open]

    def _text(self, path: Sequence[str], parent: object, emit: Emit) -> Wait:
        """The text of an element that holds no others. parent: the schema around it. Whether it ended."""
        scanner, ends = self._scanner, self._ends(path)
        while True:
            found = yield from scanner.until(ends, emit, certain_only=True)
            if not found:
                return not scanner.cut
            if found != self._open or found == ends[0]:
                if found != ends[0]:
                    scanner.put_back(found)
                return True
            text, name = yield from self._tag()
            if scanner.cut_inside([">"]):
                return False
            follows = name and not name.startswith("/") and _field(parent, name, self._root) is not None
            if follows or self._closes(name, path):  # this one was not closed
                scanner.put_back(self._open + text)
                return True
            if name.startswith("/"):
                return True
            emit(scanner.plain(self._open) + text)

    def _closes(self, name: str, path: Sequence[str]) -> bool:
        """Whether a tag ends an element around this one."""
        return name.startswith("/") and name[1:] in path[:-1]

    def _node(self, path: Sequence[str], schema: object, parent: object) -> Wait:
        """What stands in an element; None where a limit cut it."""
        kinds, scanner = _kinds(schema, self._root), self._scanner
        texts: list[str] = []
        if (kinds and not kinds & {"array", "object"}) or len(path) > _DEEPEST:
            return "".join(texts) if (yield from self._text(path, parent, texts.append)) else None
        children: list[tuple[str, Node]] = []
        ends = self._ends(path)
        while True:
            found = yield from scanner.until(ends, texts.append, certain_only=True)
            if not found and scanner.cut:
                return None
            if found != self._open or found == ends[0]:
                if found != ends[0]:
                    scanner.put_back(found)
                break
            text, name = yield from self._tag()
            if not name:
                texts.append(scanner.plain(self._open) + text)
            elif name.startswith("/"):
                if self._closes(name, path):
                    scanner.put_back(self._open + text)
                break
            else:
                inner = self._inner(schema, name, len(children))
                child = yield from self._node([*path, name], inner, schema)
                if child is None:
                    return None
                children.append((name, child))
        return Nested(children, "".join(texts)) if children else "".join(texts)

    def _inner(self, schema: object, name: str, place: int) -> object:
        """The schema of an element within one that has `schema`."""
        is_list = self._is_list(schema, [name])
        return _value(schema, place, self._root) if is_list else _field(schema, name, self._root)

    def _is_list(self, schema: object, names: Sequence[str]) -> bool:
        """Whether elements of these names are values of a list."""
        kinds, all_items = _kinds(schema, self._root), set(names) == {self._item}
        if kinds & {"array", "object"}:
            either = kinds >= {"array", "object"} and not all_items
            return "array" in kinds and not either
        return all_items

    def _written(self, node: Node, schema: object) -> str:
        """The JSON text of what an element holds."""
        if isinstance(node, str):
            kinds = _kinds(schema, self._root)
            if not node.strip() and "string" not in kinds and kinds & {"array", "object"}:
                return "[]" if "array" in kinds else "{}"
            return json.dumps(node, ensure_ascii=False) if kinds == {"string"} else as_json(node, kinds)
        if self._is_list(schema, [name for name, _ in node.children]):
            values = (
                self._written(each, _value(schema, place, self._root)) for place, (_, each) in enumerate(node.children)
            )
            return f"[{', '.join(values)}]"
        found: dict[str, list[str]] = {}
        for name, each in node.children:
            found.setdefault(name, []).append(self._written(each, _field(schema, name, self._root)))
        if node.text.strip():
            mixed = _MIXED
            while mixed in found:
                mixed = f"${mixed}"
            found[mixed] = [json.dumps(node.text, ensure_ascii=False)]
        return f"{{{', '.join(_field_text(name, values) for name, values in found.items())}}}"


class _Fields:
    """Writes the fields of the object: each name once. The same element again and again is a list."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._between, self._emits = emit, "", False
        self._names: set[str] = set()
        self._held: tuple[str, list[str]] = ("", [])

    def begin_text(self, name: str) -> Emit:
        """A string begins; takes what stands between its quotes."""
        self.flush()
        self._emits = name not in self._names
        if not self._emits:
            return no_text
        self._write(name, '"')
        return lambda text: self._emit(in_string(text))

    def end_text(self) -> None:
        """The string ends."""
        if self._emits:
            self._emit('"')

    def hold(self, name: str, value: str) -> None:
        """A whole value, which more of the same name may follow."""
        if self._held[0] == name and self._held[1]:
            self._held[1].append(value)
            return
        self.flush()
        self._held = (name, [value])

    def flush(self) -> None:
        """Write what is held."""
        (name, values), self._held = self._held, ("", [])
        if values and name not in self._names:
            self._write(name, _one_or_list(values))

    def _write(self, name: str, text: str) -> None:
        self._names.add(name)
        self._emit(f"{self._between}{json.dumps(name, ensure_ascii=False)}: {text}")
        self._between = ", "


def _field_text(name: str, values: Sequence[str]) -> str:
    return f"{json.dumps(name, ensure_ascii=False)}: {_one_or_list(values)}"


def _one_or_list(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _ends_name(character: str) -> bool:
    return character in "<>\n" or "\ud800" <= character <= "\udfff"


def _kinds(schema: object, root: object) -> frozenset[str]:
    """As `types_of`; a schema of fields or of values that names no type says it by them."""
    kinds = types_of(schema, root)
    if not kinds and isinstance(schema, Mapping):
        if "properties" in schema:
            return frozenset(("object",))
        if "items" in schema or "prefixItems" in schema:
            return frozenset(("array",))
    return kinds


def _field(schema: object, name: str, root: object, deep: int = 8) -> object:
    """The schema of a field of an object, also in a branch of a schema; None: nothing says it."""
    for each in _branches(schema, root, deep):
        properties = each.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    others = (each.get("additionalProperties") for each in _branches(schema, root, deep))
    return next((each for each in others if isinstance(each, Mapping)), None)


def _value(schema: object, place: int, root: object, deep: int = 8) -> object:
    """The schema of a value of a list; None: nothing says it."""
    for each in _branches(schema, root, deep):
        first = each.get("prefixItems")
        if isinstance(first, list) and place < len(first):
            return first[place]
        if isinstance(each.get("items"), Mapping):
            return each["items"]
    return None


def _branches(schema: object, root: object, deep: int) -> list[Mapping[str, Any]]:
    """A schema, and those that it is made of."""
    if not isinstance(schema, Mapping) or not deep:
        return []
    found: list[Mapping[str, Any]] = [schema]
    if isinstance(schema.get("$ref"), str):
        found += _branches(resolved(schema["$ref"], root), root, deep - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            found += [inner for each in schema[name] for inner in _branches(each, root, deep - 1)]
    return found
