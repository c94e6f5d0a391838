"""README and docs as data: their pages, blocks of code, links and headings."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.project import ROOT, files

PAGES = (ROOT / "README.md", *files(".md", under="docs"))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    """For messages and test ids."""
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """Code of a language; "" is the shell."""
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def prose(text: str) -> str:
    """Without blocks of code."""
    return _FENCE.sub("", text)


def shell_lines(text: str) -> Iterator[str]:
    """What a reader types, without comments."""
    for block in blocks(text, ""):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.split(" #")[0].strip()


def inline(text: str) -> list[str]:
    """Code within sentences and tables."""
    return [found.replace("\\|", "|") for found in re.findall(r"`([^`\n]+)`", prose(text))]


def links(text: str) -> list[str]:
    """Targets of links and pictures that are not of another site."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [target for target in found if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What `#...` may name: headings, as GitHub and the site spell them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page.read_text()), flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found
