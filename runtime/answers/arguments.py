"""Arguments as the wire has them → JSON text, as far as it is certain. One reader for each coding of `wire_format`.

Each gets `emit`, which begins the call with its first text, and `schema`, the parameters that the tool says it has.
"""

import ast
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.runtime.answers.scanner import Emit, Scanner, Wait
from ingot.runtime.answers.wire_format import BareKeys, Parameters
from ingot.runtime.json_pointer import resolved

Coded = Callable[[str], str]
_LONGEST_CALL = 1 << 20  # characters of one call that is read as Python
_ESCAPES = frozenset("\\'\"abfnrtv01234567\n")  # of Python's strings; behind others a backslash is one
_CODES = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {ord(each): f"\\x{ord(each):02x}" for each in "\0\n\r"}


def read_parameters(
    scanner: Scanner, form: Parameters, coded: Coded, stops: Sequence[str], schema: object, emit: Emit
) -> Wait:
    """Parameters, each for itself. stops: what stands behind the last one, for models that forget to close."""
    begin, between = coded(form.begin).strip(), ""
    end = coded(form.end).strip()
    emit("{")
    while True:
        yield from scanner.skip()
        if not (yield from scanner.accept(begin)):
            if scanner.cut_inside([begin, *stops]):
                return False
            break
        key = yield from _collect_before(scanner, form.after_key, coded)
        wire_type = None
        if form.after_type and key is not None:
            wire_type = yield from _collect(scanner, [coded(form.after_type).strip()])
        if key is None or (form.after_type and wire_type is None):
            return False
        emit(f"{between}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        between = ", "
        if form.trim:
            yield from scanner.accept("\n")
        behind = [begin, *stops]
        ends = [*([f"\n{each}" for each in (end, *behind)] if form.trim else []), end, *behind]
        kinds = _kinds(schema, key.strip())
        kinds = kinds if wire_type is None else _wire_kinds(form, wire_type, kinds)
        found = yield from _value(scanner, ends, kinds, emit)
        if found is None:
            return False
        if found.strip() != end:
            scanner.put_back(found)
    emit("}")
    return True


def _wire_kinds(form: Parameters, wire_type: str, kinds: frozenset[str]) -> frozenset[str]:
    """What the wire says of a type, unless the schema has no such type: kinds."""
    if wire_type == form.types[0]:
        return kinds if kinds and "string" not in kinds else frozenset(("string",))
    return kinds if kinds == {"string"} else frozenset(("other",))


def _value(scanner: Scanner, ends: Sequence[str], kinds: frozenset[str], emit: Emit) -> Wait:
    """One value. Returns the end that was found; None where the answer was cut."""
    if kinds == {"string"}:
        emit('"')
        found = yield from scanner.until(ends, lambda text: emit(in_string(text)), certain_only=True)
        if not found and scanner.cut:
            return None
        emit('"')
        return found
    pieces: list[str] = []
    found = yield from scanner.until(ends, pieces.append)
    if not found and scanner.cut:
        return None
    emit(as_json("".join(pieces), kinds))
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON text of a raw value. kinds: types of the schema; empty: unsaid. What is not JSON is a string, unless it
    must be a list or an object: some templates write these as Python does."""
    stripped = text.strip()
    if "boolean" in kinds and stripped in ("True", "False"):
        return stripped.lower()
    try:
        value = json.loads(stripped)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        literal = None if "string" in kinds or not kinds & {"array", "object"} else python_value(stripped)
        return json.dumps(text, ensure_ascii=False) if literal is None else literal
    if "string" in kinds and not _is_of(value, kinds - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return written


def _is_of(value: object, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "") in kinds


def _kinds(schema: object, key: str) -> frozenset[str]:
    """Types that a parameter may have; empty: unsaid."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return types_of(properties.get(key), schema) if isinstance(properties, Mapping) else frozenset()


def types_of(schema: object, root: object, deep: int = 8) -> frozenset[str]:
    """The types of a schema's instances, as far as it says; empty: unsaid. root: whose definitions it refers to."""
    if not isinstance(schema, Mapping) or not deep:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_of(resolved(reference, root), root, deep - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
        return frozenset(names.get(type(each), "null") for each in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = [types_of(each, root, deep - 1) for each in schema[name]]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
        return types_of(schema["allOf"][0], root, deep - 1)
    return frozenset()


def _collect_before(scanner: Scanner, mark: str, coded: Coded) -> Wait:
    """The text before a mark; None where the answer was cut. Between its tags there may be white space, or none."""
    first, *others = re.split(r"(?<=>)\s*(?=<)", mark.strip())
    found = yield from _collect(scanner, [coded(first)])
    for each in others if found is not None else ():
        yield from scanner.skip()
        yield from scanner.accept(coded(each))
    return None if found is not None and scanner.cut_inside([coded(each) for each in others]) else found


def _collect(scanner: Scanner, ends: Sequence[str]) -> Wait:
    """The text before one of these; None where the answer was cut."""
    pieces: list[str] = []
    found = yield from scanner.until(ends, pieces.append)
    return None if not found and scanner.cut else "".join(pieces)


def in_string(text: str) -> str:
    """A piece of a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_bare_keys(scanner: Scanner, form: BareKeys, coded: Coded, emit: Emit) -> Wait:
    """An object behind its first brace: {k:<|"|>text<|"|>,n:3}. Whether it ended."""
    quote = coded(form.quote)
    open_brackets = ["}"]
    emit("{")
    key_next = True
    while open_brackets:
        pieces: list[str] = []
        found = yield from scanner.until([quote, "{", "}", "[", "]", ",", ":"], pieces.append)
        if not found:
            return False
        bare = "".join(pieces).strip()
        if bare:
            emit(json.dumps(bare, ensure_ascii=False) if key_next else _bare_value(bare))
        if found == quote:
            emit('"')
            inside = scanner.until([quote], lambda text: emit(in_string(text)), certain_only=True)
            if not (yield from inside) and scanner.cut:
                return False
            emit('"')
        elif found in "{[":
            emit(found)
            open_brackets.append("}" if found == "{" else "]")
            key_next = found == "{"
        elif found in "}]":
            emit(open_brackets.pop())
            key_next = False
        else:
            emit(f"{found} ")
            key_next = found == "," and open_brackets[-1] == "}"
    return True


def _bare_value(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z")


def read_python_call(scanner: Scanner) -> Wait:
    """name(key=literal, ...) → (name, JSON text of the arguments); None where that is not what follows."""
    pieces: list[str] = []
    if not (yield from scanner.until(["("], pieces.append)):
        return None
    name = "".join(pieces).strip()
    if not _NAME.match(name):
        return None
    body = yield from _balanced(scanner)
    return None if body is None else (name, body)


def _balanced(scanner: Scanner) -> Wait:
    """The arguments up to the parenthesis that closes them."""
    pieces: list[str] = []
    depth = 1
    while depth:
        if not (found := (yield from scanner.until(list("\"'()[]{}"), pieces.append))):
            return None
        pieces.append(found)
        if found in "\"'":
            if not (yield from _python_string(scanner, found, pieces)):
                return None
        else:
            depth += 1 if found in "([{" else -1
    return python_arguments("".join(pieces[:-1]))


def _python_string(scanner: Scanner, quote: str, pieces: list[str]) -> Wait:
    """A string behind its first quote, as Python reads it. Whether it ended. Models write line breaks and quotes in it
    as they are: a quote is the last one where an argument or a value ends behind it."""
    if (yield from scanner.accept(quote * 2)):
        quote *= 3
        pieces.append(quote[1:])
    while True:
        inside: list[str] = []
        found = yield from scanner.until([quote, "\\"], inside.append)
        pieces.append("".join(inside).translate(_ESCAPED))
        if not found:
            return False
        if found == "\\":
            if not (yield from scanner.need(1)):
                return False
            escaped = scanner.one()
            width = _CODES.get(escaped, 0)
            known = escaped in _ESCAPES or (width and (yield from _hexadecimal(scanner, width)))
            pieces.append(f"\\{escaped}" if known else f"\\\\{escaped}")
        elif len(quote) == 3 or (yield from _ends_value(scanner)):
            pieces.append(found)
            return True
        else:
            pieces.append(f"\\{quote}")


def _hexadecimal(scanner: Scanner, width: int) -> Wait:
    """Whether so many digits follow."""
    found = yield from scanner.skip(string.hexdigits)
    scanner.put_back(found)
    return len(found) >= width


def _ends_value(scanner: Scanner) -> Wait:
    """Whether a value may end here."""
    space = yield from scanner.skip()
    follows = yield from scanner.peek()
    scanner.put_back(space)
    return follows in ("", *",:)]}")


def python_value(text: str) -> str | None:
    """A literal of Python → its JSON text; None: it is none."""
    if len(text) > _LONGEST_CALL:
        return None
    try:
        return json.dumps(_literal(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def python_arguments(text: str) -> str | None:
    """key=literal, ... → JSON text. JSON's own words for True, False and None are literals, too."""
    if len(text) > _LONGEST_CALL:
        return None
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {}
        for each in call.keywords:
            if each.arg is None:
                return None
            values[each.arg] = _literal(each.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    raise ValueError("no literal")
