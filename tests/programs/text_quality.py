"""What an engine makes of a text: perplexity, and KL divergence from the exact engine.

A text is plain, cut into windows of 256 tokens, or a JSON list, whose first 100 texts count up to 256 tokens each.
Every window starts with the model's first token.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.runtime import ModelRunner
from ingot.runtime.tokenizer import Tokenizer

WINDOW = 256


def windows_of(model: Path, text: Path) -> list[list[int]]:
    """Token ids, each window with the model's first token before it."""
    tokenizer = Tokenizer.from_dir(model)
    first = json.loads((model / "generation_config.json").read_text())["bos_token_id"]
    if text.suffix == ".json":
        texts = json.loads(text.read_text())[:100]
        parts = [tokenizer.encode(each, add_special_tokens=False)[: WINDOW - 1] for each in texts]
    else:
        ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
        parts = [ids[begin : begin + WINDOW - 1] for begin in range(0, len(ids), WINDOW - 1)]
    return [[first, *part] for part in parts]


def log_probs(engine: Path, windows: list[list[int]]) -> npt.NDArray[np.float64]:
    """[tokens after the first of each window, vocab]"""
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(windows, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    rows: npt.NDArray[np.float64] = np.concatenate([logits[:-1] for logits in out["context_logits"]]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


COLUMNS = ("size", "perplexity", "more than the exact one's", "KL from it", "same first choice")


class TextQuality:
    """Rows of a table. The first engine is the exact one."""

    def __init__(self, windows: list[list[int]]) -> None:
        self._windows = windows
        self._starts = np.cumsum([0, *(len(window) - 1 for window in windows)])[:-1]
        self.targets = np.concatenate([window[1:] for window in windows])
        self._exact: npt.NDArray[np.float64] | None = None

    @staticmethod
    def head(what: str) -> str:
        """The first lines of the table."""
        return f"| {what} | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}"

    def row(self, what: str, nbytes: int, engine: Path) -> str:
        """The difference of perplexities has a standard error, with each window as one sample: tokens of a text go
        together."""
        found = log_probs(engine, self._windows)
        exact = self._exact = found if self._exact is None else self._exact
        tokens = np.arange(len(self.targets))
        perplexity = np.exp(-found[tokens, self.targets].mean())
        lost = exact[tokens, self.targets] - found[tokens, self.targets]
        by_window = np.add.reduceat(lost - lost.mean(), self._starts)
        error = perplexity * np.sqrt(np.square(by_window).sum()) / len(lost)
        more = perplexity * (1 - np.exp(-lost.mean()))
        divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()
        same = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
        size = f"{nbytes / 1e6:.2f} MB" if nbytes >= 10_000 else f"{nbytes} bytes"
        return f"| {what} | {size} | {perplexity:.3f} | {more:+.3f} ± {error:.3f} | {divergence:.5f} | {same:.1%} |"
