"""Runs `ingot ...` as users do: in a process of its own, or, faster and otherwise the same, in this one."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from ingot.cli import app


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def succeeds(self) -> "Result":
        """This result, if the exit code is 0."""
        assert self.code == 0, self.err
        return self

    def fails(self, *words: str, code: int = 1) -> "Result":
        """This result, if it is a refusal in words: exit code, every one of `words`, no traceback, a clean stdout."""
        assert self.code == code, f"exit code {self.code}\n{self.err}"
        assert self.out == ""
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        for word in words:
            assert word in self.err, self.err
        return self

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one per line."""
        return [json.loads(line) for line in self.out.splitlines()]


def ingot(*args: object, stdin: str = "") -> Result:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", given):
        code = app.run([str(arg) for arg in args])
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def start(*args: object, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    """Start the command as a process; `before` runs in the child, e.g. to lower a limit.

    Warnings are errors but for ResourceWarning: an interrupt may hit between the opening of a file and its `with`.
    """
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "ingot", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(process: "subprocess.Popen[str]", stdin: str = "") -> Result:
    """Wait for a started command."""
    out, err = process.communicate(stdin, timeout=120)
    return Result(code=process.returncode, out=out, err=err)
