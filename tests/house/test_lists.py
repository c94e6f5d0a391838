"""Lists on pages and the lists of the code that they repeat: no name stands in one alone."""

import dataclasses
import re

from ingot.checkpoint import CheckpointConfig
from ingot.convert.gguf.architectures import ARCHITECTURES
from ingot.convert.gguf.blocks import TYPES
from ingot.convert.quantised.read import REFUSED, find_formats
from ingot.manifest import Manifest
from ingot.plugins.registry import find_op, targets
from ingot.runtime.answers.formats import REASONING_FORMATS, WIRE_FORMATS
from ingot.runtime.server.openapi import document
from ingot.step_inputs import STEP_INPUTS
from tests.house.project import ROOT, pyproject


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / f"docs/{name}.md").read_text()


def rows(text: str, begin: str) -> list[list[str]]:
    """Cells of a table, whose head begins with these words; without the head."""
    lines = text.split(f"| {begin}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def names(text: str) -> set[str]:
    """Names of one word, without what parentheses add."""
    return set(re.findall(r"[\w-]+", re.sub(r"\([^)]*\)", "", text)))


def test_architectures_and_types_of_gguf_files() -> None:
    parts = {head: cell for head, cell in rows(page("quantised_checkpoints"), "part of a GGUF file")}
    listed = [parts[head] for head in ("dense architectures", "mixtures of experts", "architectures with states")]
    assert names(" ".join(listed)) == set(ARCHITECTURES)
    types = parts["types of tensors"].removesuffix(", in any mixture")
    assert names(types) == {each.name for each in TYPES.values()}


def test_formats_of_quantised_checkpoints() -> None:
    read = {name for cells in rows(page("quantised_checkpoints"), "`quant_method`") for name in cells[0].split(", ")}
    known = find_formats()
    assert read - set(known) == set()
    assert [each.names for each in known.values() if not read & set(each.names)] == []
    refused = page("quantised_checkpoints").split("## Formats that are refused")[1].split("## ")[0].lower()
    assert [name for name in REFUSED if name not in refused.replace("-", "_") and name != "quip"] == []


def test_formats_of_tool_calls_and_reasoning() -> None:
    text = page("how-to/tools")
    listed = " ".join(cells[0] for cells in rows(text, "name of the call format"))
    assert names(listed) == {each.name for each in WIRE_FORMATS}
    reasoning = text.split("The formats of reasoning are")[1].split(". ")[0]
    assert set(re.findall(r"`(\w+)`", reasoning)) == {each.name for each in REASONING_FORMATS}


def test_paths_of_the_server() -> None:
    text = page("server")
    paths = {path.replace("{lease_id}", "{id}") for path in document(debug_hooks=True, prefill=True)["paths"]}
    known = {re.sub(r"\{\w+\}", "{", path).split("{")[0] for path in paths}
    assert len(known) > 15
    assert [path for path in known if path not in text] == []


def test_extras() -> None:
    listed = {name for cells in rows(page("how-to/install"), "extra") for name in re.findall(r"`([\w-]+)`", cells[0])}
    project = pyproject()["project"]
    assert isinstance(project, dict)
    assert listed == set(project["optional-dependencies"])


def test_inputs_of_a_step_and_who_reads_them() -> None:
    ops = sorted({kernel.split(".")[0] for target in targets() for kernel in target.kernels()})
    readers: dict[str, set[str]] = {each.name: set() for each in STEP_INPUTS}
    for op in map(find_op, ops):
        for at in op.batch_inputs:
            readers[op.inputs[at].removesuffix("?")].add(op.name)
    cells = {name.strip("`"): by for name, _, _, by in rows(page("engine_format"), "name | extent")}
    assert set(cells) == set(readers)
    assert {name: readers[name] - names(by) for name, by in cells.items() if readers[name] - names(by)} == {}


def test_keys_of_a_checkpoint_and_of_a_manifest() -> None:
    """Beside those that say what the file is."""
    section = page("checkpoint_format").split("## config.json")[1]
    checkpoint = {name for cells in rows(section, "key | required") for name in re.findall(r"`(\w+)`", cells[0])}
    assert checkpoint - {"schema_version"} == {field.name for field in dataclasses.fields(CheckpointConfig)}
    section = page("engine_format").split("## config.json")[1]
    manifest = {name for cells in rows(section, "key | holds") for name in re.findall(r"`(\w+)`", cells[0])}
    beside = {"format", "schema_version", "manifest_sha256"}
    assert manifest - beside == {field.name for field in dataclasses.fields(Manifest)}


def test_ops_whose_kernels_have_types_in_their_names() -> None:
    listed = names(" ".join(cells[0] for cells in rows(page("kernels"), "op | dtype in the name")))
    kernels = {kernel for target in targets() for kernel in target.kernels()}
    typed = {kernel.split(".")[0] for kernel in kernels if kernel.split(".")[1] != "f32"}
    assert listed - {"all", "others"} == typed
