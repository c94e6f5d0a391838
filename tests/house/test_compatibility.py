"""The table of fields in docs/server.md: its column of OpenAI is what the types of OpenAI's own package say."""

import re

from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

from tests.house.project import ROOT

COMPLETIONS, CHATS, RESPONSES = (
    frozenset(params.__annotations__) for params in (CompletionParams, ChatParams, ResponseParams)
)
SECTION = (ROOT / "docs/server.md").read_text().split("### Compatibility")[1].split("###")[0]
# what is no field of a request by itself: values and parts of others, other servers' endpoints
PARTS = {"auto", "none", "required", "allowed_tools", "strict", "reasoning", "reasoning_content"}
# what every server takes
PLAIN = {"messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p"}


def rows() -> list[tuple[str, str, str]]:
    """A row's first cell, a field that it names, what the column of OpenAI says."""
    found = []
    for line in SECTION.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5:
            found += [(cells[0], field, cells[2]) for field in re.findall(r"`([a-z_]+)(?:: \w+)?`", cells[0])]
    return [row for row in found if row[1] not in PARTS]


def test_the_column_of_openai() -> None:
    assert len(rows()) > 40
    wrong = {}
    for row, field, says in rows():
        known = CHATS if "of chats" in row else COMPLETIONS | CHATS | RESPONSES
        if (says != "no") != (field in known):
            wrong[field] = says
    assert wrong == {}


def test_every_field_of_chats_has_a_row() -> None:
    named = {field for _, field, _ in rows()} | {"presence_penalty", "frequency_penalty"}  # "penalties"
    assert sorted(CHATS - PLAIN - named) == []
