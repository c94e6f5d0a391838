"""The programs that measure drafts, on the shipped model."""

import json
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.programs.test_programs import run

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("drafts")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    build(BuildConfig(target="cpu/avx2", autotune=False), work / "c", work / "e")
    return work / "e"


def test_steps_with_drafts_are_timed(engine: Path) -> None:
    shape = ("--contexts", "5,300", "--drafts", "0,3", "--rounds", 1)
    head, _, *rows = run("draft_rows", "--engine_dir", engine, *shape).splitlines()
    assert head == "| context | drafts | ms | over none | a = 0.3 | a = 0.5 | a = 0.7 | a = 0.9 |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [each[:2] for each in cells] == [["5", "0"], ["5", "3"], ["300", "0"], ["300", "3"]]
    for _, drafts, _, cost, *gains in cells:
        expected = sum(0.9**place for place in range(int(drafts) + 1)) / float(cost)
        assert float(gains[-1]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_given_texts_are_said_with_and_without_drafts(engine: Path, tmp_path: Path, batch_size: int) -> None:
    texts = [
        {"prompt": f"The number {number} said: ", "completion": "the count and the prince, the count and the prince"}
        for number in range(3)
    ]
    path = tmp_path / "said.jsonl"
    path.write_text("\n".join(json.dumps(text) for text in texts))
    given = ("--engine_dir", engine, "--tokenizer_dir", SHIPPED, "--input_file", path, "--batch_size", batch_size)
    (row,) = run("replayed_drafts", *given, "--rounds", 1).splitlines()[2:]
    name, tokens, *_, per_step, drafts = row.strip("| ").split(" | ")
    assert name == f"said: 3, {batch_size} at a time"
    drafted, right = map(int, drafts.split(", "))
    assert 0 <= right <= drafted, "how many pay depends on the machine"
    assert float(per_step) == pytest.approx(int(tokens) / (int(tokens) - right) if batch_size == 1 else 1, rel=0.5)
