"""The site of docs/: every page has its place, it builds, and no link of it is dead. Nothing asks the network."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.house.documents import PAGES
from tests.house.project import ROOT, read_toml

PROJECT: dict[str, Any] = read_toml("zensical.toml")["project"]
BUILDER = Path(sys.executable).with_name("zensical")


def listed(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Pages of the navigation."""
    for value in (value for entry in entries for value in entry.values()):
        yield from listed(value) if isinstance(value, list) else [value]


def test_every_page_has_one_place() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert sorted(listed(PROJECT["nav"])) == sorted(pages)


class Page(HTMLParser):
    """Names within a page, and what it points at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.links, self.fetched = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by `feed`."""
        given = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := given.get(key))}
        target = given.get("href" if tag in ("a", "link") else "src")
        if target and tag == "a":
            self.links.append(target)
        elif target and given.get("rel") != "canonical":
            self.fetched.append(target)


def dead(site: Path) -> list[str]:
    """Links within the site that lead nowhere, and what a browser would fetch from elsewhere."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        found += [f"{path.name}: fetches {each}" for each in page.fetched if urlsplit(each).netloc]
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.netloc or parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].names if target in pages else set()
            if not target.is_file() or (parts.fragment and target in pages and unquote(parts.fragment) not in known):
                found.append(f"{path.name}: {link}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER.exists(), reason="the extra docs is not installed")
def test_the_site_builds_and_has_no_dead_link(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run([BUILDER, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / PROJECT["site_dir"]
    assert len(list(site.rglob("*.html"))) > len(list(listed(PROJECT["nav"])))
    assert dead(site) == []


def test_dead_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="b.html#there">x</a><a href="#here">y</a><a href="#gone">z</a><a href="c.html"></a>'
        '<script src="https://elsewhere.example/x.js"></script><a href="https://elsewhere.example">w</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    expected = ["a.html: fetches https://elsewhere.example/x.js", "a.html: #gone", "a.html: c.html"]
    assert dead(tmp_path) == expected
