"""What calibrates: the built-in text, files, lines of texts and chats; everything else is refused in words."""

from pathlib import Path

import pytest

from ingot.calibration_text import read_calibration
from ingot.errors import UsageError


def test_texts_and_chats(tmp_path: Path) -> None:
    assert len(read_calibration("builtin", tmp_path)[0]) > 20000
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read_calibration(str(tmp_path / "a.txt"), tmp_path) == ["one\ntwo\n"]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    assert read_calibration(str(lines), tmp_path) == ["one", "<|im_start|>user\ntwo<|im_end|>\n"]
    lines.write_text('{"text": "one\u2028two\x85three"}\r\n{"text": "four"}\n', encoding="utf-8")
    assert read_calibration(str(lines), tmp_path) == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (" \n", "is empty"),
        ('{"text": 3}\n', "neither a text nor a chat"),
        ('{"text": "a"}\n{"text"\n', "a.jsonl:2"),
        ('{"messages": [3]}\n', "refuses a line"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words):
        read_calibration(str(lines), tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_calibration(str(tmp_path / "none"), tmp_path)
