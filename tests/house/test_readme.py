"""The README names only commands, options, make targets and files that exist."""

import re
import shlex

import click
import pytest

from ingot.cli.app import group
from tests.house.project import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = sorted({line for line in LINES if line.startswith("ingot ")})
INLINE = re.findall(r"`((?:make|ingot) [a-z][^`]*)`", README)


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_options_exist(line: str) -> None:
    name, *rest = shlex.split(line)[1:]
    context = click.Context(group, info_name="ingot")
    command = group.get_command(context, name)
    assert command is not None, f"there is no command {name}"
    if isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize("line", sorted({*(line for line in LINES if line.startswith("make ")), *INLINE}))
def test_make_targets_exist(line: str) -> None:
    tool, name = line.split()[:2]
    if tool == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    else:
        assert group.get_command(click.Context(group, info_name="ingot"), name) is not None


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_resolve(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_first_paragraph_is_five_lines() -> None:
    assert len(README.split("\n\n")[1].splitlines()) == 5
