"""How tests find the file that has a kernel, and what of an engine's settings that file sees."""

import dataclasses
import re
from collections import defaultdict
from pathlib import Path

import pytest

from ingot.dtypes import DType
from ingot.plugins.cuda.compiler import SOURCES, Specialisation
from tests.plugins.cuda.emulated.units import UNITS, seen_by, unit_of, units_of

USUAL = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=64, tokens_per_block=32)


def included(macros: set[str]) -> list[str]:
    """What kernels.cu includes, as a preprocessor reads it."""
    found, taken = list[str](), [True]
    for line in (SOURCES / "kernels.cu").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word in ("#ifdef", "#ifndef"):
            taken.append((rest in macros) is (word == "#ifdef"))
        elif word == "#else":
            taken[-1] = not taken[-1]
        elif word == "#endif":
            taken.pop()
        elif word == "#include" and all(taken):
            found.append(rest.strip('"'))
    return found


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("latent", [0, 512])
def test_an_engine_has_the_files_of_one_piece(alone: bool, latent: int) -> None:
    macros = dataclasses.replace(USUAL, alone=alone, latent=latent).macros
    named = {each[2:].partition("=")[0] for each in macros}
    assert sorted(units_of(macros)) == sorted(included(named))


@pytest.mark.parametrize("unit", UNITS)
def test_kernels_are_found_in_their_file(unit: str) -> None:
    text = (SOURCES / unit).read_text()
    names = re.findall(r"^INGOT_KERNEL(?:_TO_SHARE)?\([^\n]*?\)\s+(\w+)\(", text, re.MULTILINE)
    assert names
    assert {unit_of(name) for name in names} == {unit}


def test_no_two_files_name_a_type_alike() -> None:
    """nvcc compiles all files of an engine as one, which tests that compile each by itself do not see."""
    files = defaultdict[str, set[str]](set)
    for path in sorted(SOURCES.glob("*.cu*")):
        for name in re.findall(r"^struct (?:alignas\(.*?\) )?(\w+)[^;\n]*$", path.read_text(), re.MULTILINE):
            files[name].add(path.name)
    assert len(files) > 50
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_a_kernel_that_no_file_has() -> None:
    with pytest.raises(KeyError, match="no_kernel"):
        unit_of("no_kernel")


def test_a_file_sees_the_macros_that_it_names_or_includes(tmp_path: Path) -> None:
    assert seen_by("draw.cu", SOURCES, USUAL.macros)[0] == ["-DINGOT_WEIGHT=BF16"]
    assert seen_by("rope_kv_write.cu", SOURCES, USUAL.macros)[0] == list(USUAL.macros)
    (tmp_path / "a.cu").write_text('#include "b.cuh"\nINGOT_KV k;')
    (tmp_path / "b.cuh").write_text("int head = INGOT_HEAD_DIM;")
    seen, texts = seen_by("a.cu", tmp_path, USUAL.macros)
    assert seen == ["-DINGOT_KV=BF16", "-DINGOT_HEAD_DIM=64"]
    assert len(texts) == 2
