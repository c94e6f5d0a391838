"""PTX text → kernels: parameters, shared variables, labels and instructions."""

import dataclasses
import functools
import re
from collections.abc import Mapping

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)[^{]*\n\{\n", re.S)
_VARIABLE = re.compile(r"\.shared \.align (\d+) \.\w(\d+) ([\w$]+)(?:\[(\d+)\])?;")
_DYNAMIC = re.compile(r"\.extern \.shared \.align (\d+) \.b8 (\w+)\[\];")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """op: "ld.global.f32" in parts; guard: the predicate's register, "" for none; text: for messages; line: of the
    source, as (file, line), where the PTX says it."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    negated: bool
    text: str
    line: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernel:
    """One entry. Equal to itself alone.

    parameters  name → (offset, bytes) in the block of parameters
    registers   prefix → type, as in "%rd" → "b64"
    shared      variable → offset; dynamic memory begins at `static_bytes`
    """

    name: str
    parameters: Mapping[str, tuple[int, int]]
    registers: Mapping[str, str]
    shared: Mapping[str, int]
    static_bytes: int
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


@functools.lru_cache(maxsize=64)
def parse(text: str) -> dict[str, Kernel]:
    """Every kernel of a module, by its name."""
    dynamic = {name: int(align) for align, name in _DYNAMIC.findall(text)}
    return {match[1]: _kernel(match[1], match[2], _body(text, match.end()), dynamic) for match in _ENTRY.finditer(text)}


def _body(text: str, begin: int) -> str:
    """Up to the brace that closes the one before it."""
    depth = 1
    for brace in re.finditer("[{}]", text[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : begin + brace.start()]
    raise ValueError("a kernel that does not end")


def _kernel(name: str, parameters: str, body: str, dynamic: Mapping[str, int]) -> Kernel:
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"\n\s*\.loc\s+(\d+) (\d+)[^\n]*", r"\n.loc \1 \2;", body)
    shared, end = {}, 0
    for align, bits, variable, count in _VARIABLE.findall(body):
        shared[variable] = end = -(-end // int(align)) * int(align)
        end += _SIZES[bits] * int(count or 1)
    used = {name: align for name, align in dynamic.items() if re.search(rf"\b{name}\b", body)}
    align = max(128, *used.values(), 0)
    end = -(-end // align) * align
    shared.update(dict.fromkeys(used, end))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line = (0, 0)
    for statement in re.split(r";|\n\s*\{\s*\n|\n\s*\}\s*\n", body):
        rest = " ".join(statement.split())
        while match := re.match(r"(\$\w+):\s*", rest):
            labels[match[1]] = len(instructions)
            rest = rest[match.end() :]
        if rest.startswith(".loc"):
            file, number = map(int, rest.split()[1:])
            line = file, number
        elif rest and not rest.startswith("."):
            instructions.append(dataclasses.replace(_instruction(rest), line=line))
    return Kernel(
        name=name,
        parameters=_parameters(parameters),
        registers={prefix: kind for kind, prefix in re.findall(r"\.reg \.(\w+)\s+(%\w+)(?:<\d+>)?;", body)},
        shared=shared,
        static_bytes=end,
        instructions=tuple(instructions),
        labels=labels,
    )


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    found, end = {}, 0
    for bits, name in re.findall(r"\.param \.\w(\d+) (\w+)", text):
        size = _SIZES[bits]
        begin = -(-end // size) * size
        found[name] = begin, size
        end = begin + size
    return found


def _instruction(text: str) -> Instruction:
    match = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", text)
    assert match is not None, f"an instruction, not {text!r}"
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])
    op = tuple(part for part in match[3].split(".") if "::" not in part)  # those say what caches should do
    return Instruction(op, tuple(each.strip() for each in operands), match[2] or "", bool(match[1]), text)
