"""docs/support.md says what is true: every cell is tried. The README sums it up."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from ingot.convert.family import family_names, find_family
from tests.families import covering_families
from tests.house import support
from tests.house.project import ROOT
from tests.house.support import (
    TOLERANCE,
    UNPROVEN,
    Support,
    columns,
    find_support,
    parse,
    stands,
    summary,
    table,
    wrapped,
)
from tests.spanning import often

UPDATE = "run: python -m tests.house.support"


# Which targets a precision meets moves on from family to family (find_support): one family of each turn.
TURNS = {family_names().index(name) % len(TOLERANCE): name for name in covering_families()}


@pytest.mark.slow
@pytest.mark.parametrize("family", often(family_names(), TURNS.values()))
def test_the_page_lists_what_was_tried(family: str, tmp_path: Path) -> None:
    """Trying raises where a cell does not hold. What is run depends on the machine; what is refused does not."""
    there = {row: cells for row, cells in parse(stands()).items() if row[0] == family}
    found = find_support(family, tmp_path, every=False)
    assert list(found) == list(there), UPDATE
    assert all(list(cells) == columns() for cells in there.values()), UPDATE
    for row, cells in found.items():
        stated = {name: there[row][name] for name in cells}
        assert _same_anywhere(stated) == _same_anywhere(cells), UPDATE


def _same_anywhere(cells: dict[str, Support]) -> dict[str, Support]:
    planned = {name: Support.UNPROVEN if cell is Support.TESTED_ON_GPU else cell for name, cell in cells.items()}
    return {
        name: cell for name, cell in planned.items() if cell in (Support.REFUSED, Support.UNPROVEN, Support.UNBUILT)
    }


def test_each_family_and_each_precision_meet_every_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is converted, built or run: what would be."""
    for name in ("convert", "build", "write_model"):
        monkeypatch.setattr(support, name, lambda *args, **kwargs: tmp_path)
    monkeypatch.setattr(support, "_logits", lambda *args: np.arange(2))
    met = {
        (family, precision, target)
        for family in family_names()
        for (_, precision), cells in find_support(family, tmp_path, every=False).items()
        for target in cells
    }
    all_of = [set(each) for each in zip(*met, strict=True)]
    assert all_of == [set(family_names()), set(TOLERANCE), set(columns())]
    often_met = {(precision, target) for family, precision, target in met if family in TURNS.values()}
    assert often_met == set(itertools.product(TOLERANCE, columns())), "without slow tests, too"
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(each[one], each[other]) for each in met} == set(itertools.product(all_of[one], all_of[other]))


def test_the_page_lists_every_family_and_no_other() -> None:
    there = parse(stands())
    assert tuple(dict.fromkeys(family for family, _ in there)) == family_names(), UPDATE
    assert all(cells["ref"] is Support.TESTED for cells in there.values())
    everywhere = [*support.on_cpus(), "cuda/smXX"]
    assert [row for row, cells in there.items() if Support.REFUSED in {cells[name] for name in everywhere}] == []


def test_the_readme_sums_up_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert summary(parse(stands())) in readme, UPDATE


def test_refused_families_are_summed_up_apart() -> None:
    rows = {("llama", "f32"): Support.UNPROVEN, ("mixtral", "f32"): Support.REFUSED, ("llama", "w8"): Support.REFUSED}
    found = {row: dict.fromkeys(parse(stands())["llama", "f32"], cell) for row, cell in rows.items()}
    assert "| `cuda/smXX` | never run on a GPU; some families refused | refused |" in summary(found)


def test_wrappers_stand_on_the_page() -> None:
    assert wrapped() in (ROOT / "docs/support.md").read_text(), UPDATE


def test_what_is_not_proven_stands_below() -> None:
    assert UNPROVEN in (ROOT / "docs/support.md").read_text()
    program = UNPROVEN.split("python -m ")[1].split(" ")[0]
    assert (ROOT / program.replace(".", "/") / "__main__.py").is_file(), "and what proves it is there"


def test_a_table_reads_back() -> None:
    row = {name: Support.TESTED for name in columns()}
    found = {("llama", precision): dict(row) for precision in TOLERANCE}
    for precision, kind in (("f32", Support.BUILDS), ("bf16", Support.BUILDS), ("w8", Support.UNPROVEN)):
        found["llama", precision]["cuda/smXX"] = kind
    found["llama", "w4g32"]["cuda/smXX"] = Support.REFUSED
    for precision in TOLERANCE:
        found["llama", precision]["tensorrt-rtx"] = Support.REFUSED
        found["llama", precision]["cpu/amx"] = Support.TRAPPED
    on_cpus = "| `cpu/amx`: tested on emulated tiles; all others: tested |"
    assert f"{on_cpus} `f32`, `bf16`: builds; `w8`: never run on a GPU | tested | refused |" in table(found)
    assert parse(table(found)) == found


def test_precisions_that_differ_on_a_cpu_have_no_row() -> None:
    found = {("llama", precision): dict.fromkeys(columns(), Support.TESTED) for precision in TOLERANCE}
    found["llama", "w8"]["cpu/avx2"] = Support.BUILDS
    with pytest.raises(AssertionError, match="llama: precisions differ on a CPU"):
        table(found)


def test_families_that_are_not_tried_again_keep_their_rows() -> None:
    first, last = family_names()[0], family_names()[-1]
    stood = {(name, each): {"ref": Support.TESTED} for name in (last, first, "gone") for each in TOLERANCE}
    tried = {(last, each): {"ref": Support.REFUSED} for each in TOLERANCE}
    found = support.joined(tried, stood)
    assert list(found) == [(name, each) for name in (first, last) for each in TOLERANCE], "in order, without others"
    assert {row[0]: cells["ref"] for row, cells in found.items()} == {first: Support.TESTED, last: Support.REFUSED}


def test_what_this_machine_cannot_run_stays_as_another_one_found_it() -> None:
    row = (family_names()[0], "f32")
    stood = {row: {"cpu/amx": Support.TESTED, "cuda/smXX": Support.TESTED_ON_GPU, "ref": Support.BUILDS}}
    tried = {row: {"cpu/amx": Support.BUILDS, "cuda/smXX": Support.UNPROVEN, "ref": Support.TESTED}}
    kept = {"cpu/amx": Support.TESTED, "cuda/smXX": Support.TESTED_ON_GPU, "ref": Support.TESTED}
    assert support.joined(tried, stood) == {row: kept}
    refused = {row: dict.fromkeys(kept, Support.REFUSED)}
    assert support.joined(refused, stood) == refused


def test_each_row_says_what_people_call_the_models() -> None:
    names = [find_family(each).models for each in family_names()]
    assert all(names)
    assert len(set(names)) == len(names)
    there = [line.split(" | ")[1] for line in stands().splitlines()[2:]]
    assert there == names, UPDATE
