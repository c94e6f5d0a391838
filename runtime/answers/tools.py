"""The tools of a request, and which of them its answer may or must call: OpenAI's `tools` and `tool_choice`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ingot.errors import RequestError

MOST_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function. parameters: the JSON schema of its arguments. strict: they keep to it. spec: as the template sees
    it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    spec: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """tools: all that the model is told of. callable: those that may be called. needs: a call is all of the answer.
    named: the choice names one. parallel: several calls may be in one answer."""

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    needs: bool = False
    named: bool = False
    parallel: bool = True

    @property
    def constrained(self) -> bool:
        """Whether a grammar has to see to it."""
        narrower = len(self.callable) < len(self.tools) or not self.parallel
        return bool(self.callable) and (self.needs or narrower or any(each.strict for each in self.callable))

    def specs(self) -> list[Mapping[str, Any]] | None:
        """For the template; None: no tools."""
        return [each.spec for each in self.tools] or None


NO_TOOLS = ToolUse()


def read_tools(tools: object, choice: object = None, parallel: bool | None = None) -> ToolUse:
    """Raises RequestError. With "none" the model is not told of the tools, so that it calls none of them."""
    read = [] if tools is None else _read_list(tools)
    names = [each.name for each in read]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError("two tools have one name", where="tools", got=twice)
    mode, allowed = _read_choice("auto" if choice is None else choice, names)
    if mode in ("required", "named") and not read:
        raise RequestError("tool_choice asks for a call, and there are no tools", where="tool_choice")
    if mode == "none" or not read:
        return NO_TOOLS
    return ToolUse(
        tools=tuple(read),
        callable=tuple(each for each in read if each.name in allowed),
        needs=mode in ("required", "named"),
        named=mode == "named",
        parallel=parallel is not False and mode != "named",
    )


def _read_list(tools: object) -> list[Tool]:
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list", where="tools", got=repr(tools)[:100])
    if len(tools) > MOST_TOOLS:
        raise RequestError(
            "there are too many tools", where="tools", expected=f"at most {MOST_TOOLS}", got=f"{len(tools)}"
        )
    return [_read_tool(each, f"tools[{place}]") for place, each in enumerate(tools)]


def _read_tool(tool: object, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(
            "a tool must be a function",
            where=where,
            expected='{"type": "function", "function": {"name": ..., "parameters": a JSON schema}}',
            got=repr(tool)[:100],
        )
    for place, unknown in (
        (where, tool.keys() - {"type", "function"}),
        (f"{where}.function", function.keys() - _FUNCTION_KEYS),
    ):
        if unknown:
            raise RequestError("a tool has an unknown field", where=place, got=repr(min(unknown, key=str))[:100])
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.match(name):
        raise RequestError(
            "the name of a tool must be 1 to 128 letters, digits, dots, _ and -",
            where=f"{where}.function.name",
            got=repr(name)[:150],
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError("the description of a tool must be text", where=f"{where}.function.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError("strict of a tool must be true or false", where=f"{where}.function.strict")
    if not isinstance(parameters, Mapping | None) or (parameters or {}).get("type", "object") != "object":
        raise RequestError(
            "the parameters of a tool must be the JSON schema of an object",
            where=f"{where}.function.parameters",
            got=repr(parameters)[:100],
        )
    spec = {key: value for key, value in function.items() if value is not None and key != "strict"}
    spec.setdefault("parameters", {"type": "object", "properties": {}})
    return Tool(
        name=name,
        parameters={"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})},
        strict=bool(function.get("strict")),
        spec={"type": "function", "function": spec},
    )


Mode = Literal["none", "auto", "required", "named"]


def _read_choice(choice: object, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    """How tools are to be called, and which of them."""
    if choice == "none":
        return "none", ()
    if choice == "auto":
        return "auto", names
    if choice == "required":
        return "required", names
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "named", [_known(_name_of(choice), names)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
        tools = inner.get("tools") if isinstance(inner, Mapping) else None
        if mode in ("auto", "required") and isinstance(tools, list) and tools:
            return mode, [_known(_name_of(each), names) for each in tools]
    raise RequestError("tool_choice cannot be read", where="tool_choice", expected=_CHOICES, got=repr(choice)[:150])


def _name_of(each: object) -> object:
    """{"type": "function", "function": {"name": ...}}, or flat as in the responses API."""
    if not isinstance(each, Mapping) or each.get("type") != "function":
        return None
    function = each.get("function", each)
    return function.get("name") if isinstance(function, Mapping) else None


def _known(name: object, names: Sequence[str]) -> str:
    if not isinstance(name, str) or name not in names:
        raise RequestError(
            "tool_choice names a tool that the request does not have",
            where="tool_choice",
            expected=", ".join(names)[:300] or "a request with tools",
            got=repr(name)[:150],
        )
    return name
