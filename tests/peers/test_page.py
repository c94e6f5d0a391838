"""Records of comparisons: what a run leaves, and that the published pages say what the records say."""

from pathlib import Path

import pytest

from ingot.errors import ConfigError
from tests.house.project import ROOT
from tests.peers.__main__ import parse, write
from tests.peers.limits import Limits
from tests.peers.page import HEADLINE, UPDATE, pages, readme_sentence
from tests.peers.record import FOLDER, LoadRow, read, written
from tests.peers.report import Heading
from tests.peers.rounds import Mixed, Outcome, Trial, Turn

MACHINE = Limits(bandwidth=20e9, buffer_bytes=1000, peaks={"int8.avx2": 200e9})
HEADING = Heading(
    model="tinyllama",
    date="2026-01-02 03:04",
    machine="a machine",
    isa="avx2",
    threads=2,
    rounds=2,
    regimes=["decode:1"],
    load="a trace",
    tpots=[0.2],
)


def outcome(engine: str, *speeds: float, mixed: Mixed | None = None) -> Outcome:
    turns = [Turn(speeds={"decode:1": speed}, limits={"decode:1": 100.0}, machine=MACHINE) for speed in speeds]
    return Outcome(engine=engine, precision="w8", weights="w", version="1.0", turns=turns, mixed=mixed)


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.name)
def test_the_pages_and_the_chart_say_what_the_records_say(path: Path) -> None:
    assert path.read_text() == pages()[path], UPDATE


def test_the_readme_says_what_the_records_say() -> None:
    assert readme_sentence() in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_records_read_back_and_are_named_by_their_date(path: Path) -> None:
    record = read(path)
    assert path.stem.startswith(record.date)
    assert written(record) == path.read_text()
    for group in record.groups:
        for row in group.rows:
            assert set(row.speeds) == set(row.fractions) == set(record.regimes)
        assert set(group.ratios) == set(record.regimes)
        assert {len(rounds) for rounds in group.ratios.values()} == {record.rounds}


def test_a_run_leaves_a_record(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:00.0000000,100,10\n" * 200)
    asked = ["--work", str(tmp_path), "--model", "tinyllama", "--regimes", "decode:1", "--trace", str(trace)]
    trial = Trial(
        name="alone",
        requests=1,
        ended=1,
        complete=True,
        seconds=1.0,
        shares=[1.0],
        ttft=[0.264, 0.3],
        tpot=[0.0128, 0.02],
        error=None,
    )
    loads = [Mixed(at_once=4.1666, goodputs=[2.0944], trials=[trial]), Mixed(at_once=1.0, goodputs=[0.5])]
    outcomes = [outcome("ingot", 30, 44, mixed=loads[0]), outcome("fast", 20, 11, mixed=loads[1])]
    write(tmp_path / "results", HEADING, outcomes, parse([*asked, "--isa", "avx2", "--threads", "2"], ("avx2",)))
    record = read(tmp_path / "results/record.json")
    assert record.groups[0].rows[0].speeds == {"decode:1": 37.0}
    assert record.groups[0].ratios == {"decode:1": (1.5, 4.0)}
    assert (record.versions, record.date, record.groups[0].limits) == ({"fast": "1.0"}, "2026-01-02", {"decode:1": 100})
    assert record.command.startswith("python -m tests.peers --work DIR --model tinyllama --peers llama.cpp,")
    assert parse(record.command.replace("trace.csv", str(trace)).split()[3:], ("avx2",)).isa == "avx2"
    assert record.load is not None
    assert record.load.rows[0] == LoadRow(
        engine="ingot", weights="w", ttft=0.26, tpot=0.013, at_once=4.17, goodputs=(2.09,)
    )


def test_a_record_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / f"{HEADLINE}.json").read_text()
    (tmp_path / "a.json").write_text(text.replace('"rounds": 2', '"round": 2'))
    with pytest.raises(ConfigError, match="rounds"):
        read(tmp_path / "a.json")
