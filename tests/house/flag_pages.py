"""Writes the tables "Flag by flag" of docs/from from the rows that the command line answers with:
`python -m tests.house.flag_pages`."""

import re
from pathlib import Path

from ingot.cli.llama_cpp_flags import LLAMA_CPP
from ingot.cli.other_flags import table
from ingot.cli.vllm_flags import VLLM
from tests.house.project import ROOT

TABLES = {
    ROOT / "docs/from/vllm.md": table(VLLM, "vLLM"),
    ROOT / "docs/from/llama-cpp.md": table(LLAMA_CPP, "llama.cpp"),
}
_SECTION = re.compile(r"(?<=## Flag by flag\n\n)(?:\|.*\n)+")


def written(page: Path) -> str:
    """The page with its table as the rows have it."""
    text, count = _SECTION.subn(lambda _: TABLES[page] + "\n", page.read_text())
    assert count == 1, f"{page} must have a section 'Flag by flag' that begins with a table"
    return text


if __name__ == "__main__":
    for each in TABLES:
        each.write_text(written(each))
