"""Plain words: README, docs, help texts and error messages do without the phrases that readers stumble over."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ingot.cli.app import COMMANDS, group
from tests.house.documents import PAGES, name, prose
from tests.house.project import files, package_files, tree_of

# phrase → what to say instead; docs/style.md has the reasons
AVOID = {
    r"\b[Ll]est\b": "so that ... not",
    r"\b[Ww]hoever\b": "those who, the one that",
    r"\b(is|are|be) none\b": "there is no",
    r"\bto be had\b": "can be installed, exists",
    r"\b[Oo]ne must\b": "say who must",
    r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|less|wider)\w+": "is not a ...",
    r"\b(stays?|is|are) of use\b": "is useful",
    r"\bbut where\b": "except where",
    r"\bsave (?:where|that)\b": "except where",
    r"\bheld against\b": "compared with",
    r"\bas of (?:`|the op)": "as in",
    r"\bhas a say in\b": "decides, changes",
    r"\bthe very (?!first|last)": "exactly the",
    r"\bso many (?:requests|tokens|threads|sequences|seconds|steps|rows|blocks)\b": "this many",
    r"(?:^|(?<=[.?!] ))Of (?!course)": "begin with the subject",
    r"(?:^|(?<=[.?!] ))Recorded:": "begin with the subject or the verb",
}
# and in documents alone: a step is an iteration of the engine
AVOID_IN_DOCUMENTS = {
    r"\bplan steps?\b": "kernel call",
    r"\bsteps? of (?:the|a) [Pp]lan\b": "kernel call",
    r"\b[Pp]roducts? of (?:few|many) rows\b": "matmul",
}
# This page quotes what it forbids.
EXEMPT = ("docs/style.md",)
# private words of old, everywhere → the field's
PRIVATE = {r"passports?": "verification, results", r"forecasts?|forecasting": "estimate"}
# and as names in code
PRIVATE_NAMES = {
    "turned": "rotated, transposed",
    "unturned": "unrotated",
    "turns_pairs": "rotates_pairs",
    "turn_and_store": "rotate_and_store",
    "turn_queries_launch": "rotate_queries_launch",
    "Asking": "SamplingParams",
    "inbox": "event_queue",
    "Crossing": "LoopBridge",
    "pulse": "health",
    "Pulse": "HealthMonitor",
    "StepsAhead": "EngineThread",
    "News": "StreamDelta",
    "Pace": "TpotBudget",
    "read_turn": "read_priority",
    "Gathering": "OutputAccumulator",
    "TimesItself": "SelfTuning",
    "WithFiles": "HasArtifacts",
    "Homes": "NumaPlacement",
    "homes": "numa",
    "DrawRules": "LogitsRules",
    "SampleRows": "SamplingBatch",
    "ProbRows": "LogprobSpec",
    "Course": "SequenceRules",
    "RepeatSession": "Session",
    "takes_own": "reads_private",
    "keys_only": "kv_only",
    "unbuildable": "build_blocker",
    "live_peak": "peak_flops",
    "kOwnElements": "kPrivateRowElements",
}


def stumbles(text: str, avoid: dict[str, str] = AVOID) -> list[str]:
    """Phrases to rewrite, each with what to say."""
    flat = " ".join(text.split())
    return [
        f"{found.group(0)!r}: {instead}" for phrase, instead in avoid.items() for found in re.finditer(phrase, flat)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in EXEMPT], ids=name)
def test_documents(page: Path) -> None:
    paragraphs = re.split(r"\n\n|\n[|-]|\|", prose(page.read_text()))
    assert [found for each in paragraphs for found in stumbles(each.strip(), AVOID | AVOID_IN_DOCUMENTS)] == []


def helps() -> Iterator[tuple[str, str]]:
    """Command or option → its help."""
    context = click.Context(group, info_name="ingot")
    waiting = [(f"ingot {each}", group.get_command(context, each)) for each in COMMANDS]
    while waiting:
        title, command = waiting.pop()
        assert command is not None
        yield title, command.help or ""
        yield from (
            (f"{title} {each.opts[0]}", each.help or "") for each in command.params if isinstance(each, click.Option)
        )
        if isinstance(command, click.Group):
            waiting += [(f"{title} {key}", inner) for key, inner in command.commands.items()]


def test_help_texts() -> None:
    assert [f"{title}: {found}" for title, text in helps() for found in stumbles(text)] == []


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every statement and call of the package that says something, read once."""
    says = (ast.Raise, ast.Call, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    trees = ((path, tree_of(path)) for path in package_files())
    return [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, says)]


def messages() -> Iterator[tuple[str, str]]:
    """Place → every text in an expression that is raised, and in the reasons that functions return."""
    for path, node in nodes():
        if isinstance(node, ast.Raise) and node.exc is not None:
            for inner in ast.walk(node.exc):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield f"{path}:{inner.lineno}", inner.value


def test_error_messages() -> None:
    assert [f"{place}: {found}" for place, text in messages() for found in stumbles(text)] == []


SAYS = ("warn", "note", "detail", "say", "_say")


def log_lines() -> Iterator[tuple[str, ast.expr, bool]]:
    """Place → the text of a line that a program logs or prints while it works; whether it goes to the log."""
    for path, node in nodes():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, base = getattr(node.func, "attr", getattr(node.func, "id", "")), getattr(node.func, "value", None)
        logs = getattr(base, "id", "") == "_LOG"
        if logs or name in SAYS or (name == "append" and getattr(base, "id", "") == "notes"):
            yield f"{path}:{node.lineno}", node.args[0], logs


def test_log_lines() -> None:
    """They are plain, too. One form: `what happened, with which value; what to do next`, as one line without a stop."""
    wrong, places = [], {True: 0, False: 0}
    for place, text, logs in log_lines():
        said = [each.value for each in ast.walk(text) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        places[logs] += bool(said)
        wrong += [f"{place}: {found}" for each in said for found in stumbles(each)]
        if logs and not isinstance(text, ast.Constant):
            wrong.append(f"{place}: a text whose values are arguments of the call")
        if said and (said[-1].rstrip("\n").endswith(".") or said[0][:1].isupper()):
            wrong.append(f"{place}: begins small and ends without a stop")
    assert wrong == []
    assert places[True] >= 8
    assert places[False] >= 20


def docstrings() -> Iterator[tuple[str, str]]:
    """Place → the docstring there."""
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def test_docstrings() -> None:
    """`none` is a word that they need: None where there is none."""
    found = [(place, each) for place, text in docstrings() for each in stumbles(text) if " none'" not in each]
    assert found == []


def test_sources() -> None:
    """The words that no comment needs either; the others are for people who judge a sentence."""
    places = {*files(".py", ".h", ".cpp", ".cu", ".cuh")} - {Path(__file__)}
    found = [(path, word) for path in places for word in re.findall(r"\b(?:lest|whoever)\b", path.read_text(), re.I)]
    assert found == []


def private_words(text: str) -> list[str]:
    """Also as parts of names, such as `store_passport` and `OpForecast`."""
    found = re.findall("|".join(PRIVATE), text, re.IGNORECASE)
    names = {name.strip("_") for name in re.findall(r"\w+", _without_prose(text))}
    return found + sorted(names & PRIVATE_NAMES.keys())


def _without_prose(text: str) -> str:
    """Code without comments and strings: "turned into text" is plain."""
    strings = r'""".*?"""|"(?:[^"\\\n]|\\.)*"'
    return re.sub(rf"{strings}|(?:#|//)[^\n]*", "", text, flags=re.DOTALL)


def test_private_words() -> None:
    """The field's terms stand in code, documents and tests alike: docs/glossary.md."""
    code = {*files(".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".toml")} - {Path(__file__)}
    found = {str(path): private_words(path.read_text()) for path in code}
    for page in files(".md"):
        found[str(page)] = re.findall("|".join(PRIVATE), page.read_text(), re.IGNORECASE)
    assert {path: words for path, words in found.items() if words} == {}
    assert len(found) > 500


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def store_passport(self) -> None:", "passport"),
        ("class OpForecast:  # of a step", "Forecast"),
        ('raise UsageError("there is no forecast")', "forecast"),
        ("keys, turned = split(x)", "turned"),
        ("const int64_t _turned = 3;  // numbers", "turned"),
    ],
)
def test_each_private_word_is_noticed(text: str, word: str) -> None:
    assert private_words(text) == [word]


def test_plain_words_pass() -> None:
    assert private_words('raise UsageError("the tokens cannot be turned into text")  # as they turned out') == []


@pytest.mark.parametrize(
    "text",
    [
        "It copies, lest it fail.",
        "Whoever waits looks.",
        "A number that is none becomes null.",
        "Of AMX, the code runs on any CPU.",
        "It runs. Of the two, one stays.",
        "Run so many requests at once.",
        "The layers are held against the graph.",
        "The file is no tensor.",
    ],
)
def test_each_phrase_is_noticed(text: str) -> None:
    assert len(stumbles(text)) == 1


def test_words_of_documents_are_noticed() -> None:
    found = stumbles("A plan step is one of the steps of a plan. Products of few rows.", AVOID_IN_DOCUMENTS)
    assert len(found) == 3


def test_plain_sentences_pass() -> None:
    assert stumbles("Of course, none of them is lost. There is no kernel. The size of a block is 32.") == []
