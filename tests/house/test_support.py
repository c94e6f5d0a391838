"""docs/support.md says what is true: every cell is tried. The README sums it up."""

from pathlib import Path

import pytest

from ingot.convert.family import family_names
from ingot.convert.wrapped import WRAPPERS
from tests.house.project import ROOT
from tests.house.support import UNPROVEN, Support, find_support, parse, stands, summary, table, wrapped

UPDATE = "run: python -m tests.house.support"


@pytest.mark.parametrize("family", family_names())
def test_the_page_lists_what_was_tried(family: str, tmp_path: Path) -> None:
    """Trying raises where a cell does not hold; which cells are run depends on the machine."""
    there = {row: set(cells) for row, cells in parse(stands()).items() if row[0] == family}
    assert there == {row: set(cells) for row, cells in find_support(family, tmp_path).items()}, UPDATE


def test_the_page_lists_every_family_and_no_other() -> None:
    there = parse(stands())
    assert tuple(dict.fromkeys(family for family, _ in there)) == family_names(), UPDATE
    assert all(cells["ref"] is Support.TESTED for cells in there.values())


def test_the_readme_names_every_family_and_sums_up_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in family_names() if f"`{name}`" not in readme] == []
    assert summary(parse(stands())) in readme, UPDATE


def test_refused_families_are_summed_up_apart() -> None:
    rows = {("llama", "f32"): Support.UNPROVEN, ("mixtral", "f32"): Support.REFUSED, ("llama", "w8"): Support.REFUSED}
    found = {row: dict.fromkeys(parse(stands())["llama", "f32"], cell) for row, cell in rows.items()}
    assert "| `cuda/smXX` | never run on a GPU; some families refused | refused |" in summary(found)


def test_wrappers_stand_on_the_page_and_in_the_readme() -> None:
    assert wrapped() in (ROOT / "docs/support.md").read_text(), UPDATE
    readme = (ROOT / "README.md").read_text()
    assert [name for name in WRAPPERS if f"`{name}`" not in readme] == []


def test_what_is_not_proven_stands_below() -> None:
    assert UNPROVEN in (ROOT / "docs/support.md").read_text()
    program = UNPROVEN.split("python -m ")[1].split(" ")[0]
    assert (ROOT / program.replace(".", "/") / "__main__.py").is_file(), "and what proves it is there"


def test_a_table_reads_back() -> None:
    found = {
        ("llama", "f32"): {
            "cpu/amx": Support.BUILDS,
            "cpu/avx512bf16": Support.BUILDS,
            "cpu/avx512": Support.BUILDS,
            "cpu/avxvnni": Support.BUILDS,
            "cpu/avx2": Support.TESTED,
            "cuda/smXX": Support.UNPROVEN,
            "ref": Support.TESTED,
            "tensorrt/smXX": Support.UNPROVEN,
            "tensorrt-rtx": Support.REFUSED,
        }
    }
    assert parse(table(found)) == found
