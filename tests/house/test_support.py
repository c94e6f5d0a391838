"""The support table of the README says what is true: every cell is tried."""

from pathlib import Path

import pytest

from ingot.convert.family import family_names
from tests.house.project import ROOT
from tests.house.support import UNPROVEN, Support, find_support, parse, table, written

UPDATE = "run: python -m tests.house.support"


@pytest.mark.parametrize("family", family_names())
def test_the_readme_lists_what_was_tried(family: str, tmp_path: Path) -> None:
    """Trying raises where a cell does not hold; which cells are run depends on the machine."""
    stands = {row: set(cells) for row, cells in parse(written()).items() if row[0] == family}
    assert stands == {row: set(cells) for row, cells in find_support(family, tmp_path).items()}, UPDATE


def test_the_readme_lists_every_family_and_no_other() -> None:
    stands = parse(written())
    assert tuple(dict.fromkeys(family for family, _ in stands)) == family_names(), UPDATE
    assert all(cells["ref"] is Support.TESTED for cells in stands.values())


def test_what_is_not_proven_stands_below() -> None:
    assert UNPROVEN in (ROOT / "README.md").read_text()
    program = UNPROVEN.split("python -m ")[1].split(" ")[0]
    assert (ROOT / program.replace(".", "/") / "__main__.py").is_file(), "and what proves it is there"


def test_a_table_reads_back() -> None:
    found = {
        ("llama", "f32"): {
            "cpu/amx": Support.BUILDS,
            "cpu/avx512bf16": Support.BUILDS,
            "cpu/avx512": Support.BUILDS,
            "cpu/avx2": Support.TESTED,
            "cuda/smXX": Support.UNPROVEN,
            "ref": Support.TESTED,
            "tensorrt/smXX": Support.UNPROVEN,
            "tensorrt-rtx": Support.REFUSED,
        }
    }
    assert parse(table(found)) == found
