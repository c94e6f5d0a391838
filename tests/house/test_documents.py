"""README and docs name only commands, options, programs, files and headings that exist; every page can be found."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

import ingot.errors
from ingot.cli.app import group
from ingot.errors import IngotError
from tests.house import metrics_page
from tests.house.documents import PAGES, anchors, blocks, inline, links, name, shell_lines
from tests.house.project import ROOT, files

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name)
# The program of its page makes it.
ABSENT = ("tests/gpu_proof/results",)
# Packages that a page tells to install, and that no test of ours needs.
OTHERS = ("peft",)
ROOMS = ("src", "convert", "builder", "plugins", "runtime", "configs", "tests", "examples", "docs", ".ci")


def wrong_command(line: str) -> str | None:
    """What of `ingot ...` does not exist."""
    context = click.Context(group, info_name="ingot")
    command: click.Command | None = group
    _, *rest = [word for word in shlex.split(line) if word not in ("...", "…")]
    known = {option for parameter in group.params for option in parameter.opts} | {"--help"}
    while rest and not rest[0].startswith("-") and isinstance(command, click.Group):
        command = command.get_command(context, rest.pop(0))
    if command is None:
        return f"{line}: no such command"
    known |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word.split("=")[0] for word in rest if word.startswith("--")]
    wrong = [word for word in unknown if word not in known]
    return f"{line}: no option {', '.join(wrong)}" if wrong else None


@EVERY_PAGE
def test_commands_and_options_exist(page: Path) -> None:
    text = page.read_text()
    typed = [line.partition(" && ")[0] for line in shell_lines(text) if re.match(r"ingot [a-z-]", line)]
    said = [each for each in inline(text) if re.match(r"ingot [a-z-]", each)]
    assert [wrong for line in (*typed, *said) if (wrong := wrong_command(line))] == []


def test_wrong_commands_are_noticed() -> None:
    assert wrong_command("ingot biuld") == "ingot biuld: no such command"
    assert wrong_command("ingot bench latncy") == "ingot bench latncy: no such command"
    assert (
        wrong_command("ingot run --engine_dir e --tempo 1") == "ingot run --engine_dir e --tempo 1: no option --tempo"
    )
    assert wrong_command("ingot bench kernels --engine_dir e") is None


@EVERY_PAGE
def test_programs_and_make_targets_exist(page: Path) -> None:
    text = page.read_text()
    said = [*shell_lines(text), *inline(text)]
    makefile = (ROOT / "Makefile").read_text()
    targets = [found[1] for each in said if (found := re.match(r"make ([a-z]+)$", each))]
    assert [each for each in targets if not re.search(rf"^{each}:", makefile, flags=re.MULTILINE)] == []
    modules = [found[1] for each in said if (found := re.search(r"python -m ((?:tests|ingot)[\w.]*)", each))]
    assert [each for each in modules if importlib.util.find_spec(each) is None] == []


@EVERY_PAGE
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)}: {link}: no such heading"


@EVERY_PAGE
def test_files_of_the_repository_exist(page: Path) -> None:
    """Those that a page names as code, from the root; <name> stands for any name."""
    named = [each for each in inline(page.read_text()) if re.fullmatch(rf"({'|'.join(ROOMS)})(/[\w.-]+)+/?", each)]
    named = [each for each in named if each not in ABSENT]
    assert [each for each in named if not (ROOT / each).exists() and not (ROOT / f"{each}.py").exists()] == []


@EVERY_PAGE
def test_python_on_the_pages_imports_what_is_there(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module not in OTHERS:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not _has(module, alias.name)] == []


def _has(module: ModuleType, name: str) -> bool:
    """Whether the module has this name, or is a package with a module of this name."""
    if hasattr(module, name):
        return True
    return hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def test_the_readme_is_short_and_the_index_has_every_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    index = ROOT / "docs/index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    assert {page for page in PAGES if page.parent != ROOT} - listed == {index}


def by_its_name_alone(text: str) -> list[str]:
    """Commands that would install whatever PyPI has under ingot's name: the project is not there."""
    return re.findall(r"pip3? install (?:-\S+ )*['\"]?ingot(?![\w.-])\S*", text)


def test_nothing_says_to_install_ingot_from_pypi() -> None:
    sources = [page for page in files(".py") if "tests" not in page.relative_to(ROOT).parts]
    assert {name(page): found for page in (*PAGES, *sources) if (found := by_its_name_alone(page.read_text()))} == {}
    assert by_its_name_alone("pip install 'ingot[serve]' or pip install -U ingot") == [
        "pip install 'ingot[serve]'",
        "pip install -U ingot",
    ]
    assert by_its_name_alone('pip install "$(ls dist/ingot-*.whl)[serve]"') == []
    assert by_its_name_alone("pip install 'ingot-VERSION-....whl[serve]'") == []


def test_the_page_of_errors_has_every_class() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    classes = [each for each in vars(ingot.errors).values() if isinstance(each, type)]
    names = {each.__name__ for each in classes if issubclass(each, IngotError) and each is not IngotError}
    assert {each for each in names if f"| `{each}` |" not in text} == set()


def test_the_page_of_metrics_is_that_of_the_server() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m tests.house.metrics_page"


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_name_metrics_that_exist(file: str) -> None:
    used = set(re.findall(r"ingot_[a-z_]+", (ROOT / "examples/deploy" / file).read_text()))
    kinds = {key: kind for key, (kind, _, _) in metrics_page.names().items()}
    known = {f"{key}{end}" for key, kind in kinds.items() for end in ("_bucket", "_sum", "_count", "") if end or kind}
    assert len(used) >= 4
    assert used - known == set()
