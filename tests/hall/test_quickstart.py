"""The figures of `ingot quickstart`, of a run whose times are known."""

from pathlib import Path

import pytest

from ingot.bench.bytes_read import decode_bytes
from ingot.engine import read_plan
from ingot.quickstart import quickstart


@pytest.mark.slow
def test_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens at 0.5 s, then one at 0.75 and one at 1.5: two came late, in a second. The memory reads 2 GB/s."""
    monkeypatch.setattr("ingot.quickstart._generate", lambda *_: [0.5, 0.5, 0.75, 1.5])
    monkeypatch.setattr("ingot.quickstart.machine_bandwidth", lambda *_: 2e9)
    report = quickstart(tmp_path, "ref", lambda *_: None, lambda text: None)
    assert (report.ttft_ms, report.tokens, report.machine_gbs) == (500, 4, 2)
    assert report.tpot_ms == pytest.approx(500)
    moved = decode_bytes(read_plan(tmp_path / "engine"), batch_size=1, context=report.prompt_tokens + 2)
    assert report.bandwidth_fraction == pytest.approx(moved / 0.5 / 2e9)
    assert report.engine_bytes > 5_000_000
    assert report.peak_memory_bytes > 50_000_000
