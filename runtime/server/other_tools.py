"""Tools that are not functions of the client: agents send them, and this server has none of them.

They are refused by name. With `--skip_unsupported_tools` they are left out, and a header of the answer names them.
"""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ingot.runtime.server.api_error import ApiError

HEADER = "x-ingot-skipped-tools"
_MOST_NAMED = 32  # in the header


class OtherTool(BaseModel):
    """A tool of some other type, with whatever fields it has."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]


Tool = TypeVar("Tool", bound=BaseModel)


def tag_of(value: object, own: Sequence[str], tag: str) -> str:
    """Which model reads a tool: `tag` what has one of the types `own` or none, OtherTool the rest."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return tag if not isinstance(kind, str) or kind in own else OtherTool.__name__


def functions_of(tools: Sequence[Tool | OtherTool], *, skip: bool) -> list[Tool]:
    """The functions of the client. Raises ApiError for any other tool, unless they are skipped."""
    found = []
    for place, tool in enumerate(tools):
        if not isinstance(tool, OtherTool):
            found.append(tool)
        elif not skip:
            raise ApiError(
                400,
                f"tools.{place}.type: this server runs no tools of its own; expected a function of the client, got "
                f"{tool.type!r}. Start the server with --skip_unsupported_tools to leave such tools out",
                param=f"tools.{place}.type",
                code="invalid_value",
            )
    return found


def skipped_header(tools: Sequence[BaseModel] | None) -> dict[str, str]:
    """The header that names the types of the tools left out, each once; none where there are none."""
    types = dict.fromkeys(tool.type for tool in tools or () if isinstance(tool, OtherTool))
    return {HEADER: ", ".join(list(types)[:_MOST_NAMED])} if types else {}
