"""The support table of the README says what is true: every cell is tried."""

from pathlib import Path

from tests.house.project import ROOT
from tests.house.support import UNPROVEN, Support, find_support, parse, table, written


def test_the_readme_lists_what_was_tried(tmp_path: Path) -> None:
    """Trying raises where a cell does not hold; which cells are run depends on the machine."""
    stands, found = parse(written()), find_support(tmp_path)
    assert {row: set(cells) for row, cells in stands.items()} == {row: set(cells) for row, cells in found.items()}, (
        "run: python -m tests.house.support"
    )
    assert all(cells["ref"] is Support.TESTED for cells in stands.values())


def test_what_is_not_proven_stands_below() -> None:
    assert UNPROVEN in (ROOT / "README.md").read_text()
    assert (ROOT / UNPROVEN.split("python ")[1].split(" ")[0]).is_file(), "and what proves it is there"


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
