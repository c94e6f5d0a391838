"""Logits of engine and source → KL divergence, agreement, perplexity."""

import numpy as np
import numpy.typing as npt

from ingot.compare.report import LogitMetrics
from ingot.step_io import Int32

Float64 = npt.NDArray[np.float64]


class LogitMeter:
    """Adds up over groups of sequences. is_text: whether the tokens are of a text, so that a perplexity means one."""

    def __init__(self, *, is_text: bool) -> None:
        self._is_text = is_text
        self._left_out = 0
        self._kl: list[Float64] = []
        self._agree: list[npt.NDArray[np.bool_]] = []
        self._surprise: list[Float64] = []  # [engine, source] of each token that was foretold

    def add(self, sequences: Int32, engine: npt.NDArray[np.floating], source: Float64) -> None:
        """sequences [count, length]; logits [count * length, vocab]. Positions do not count where the logits of either
        hold NaN or infinities: there are no probabilities."""
        usable = np.isfinite(engine).all(axis=1) & np.isfinite(source).all(axis=1)
        ours, reference = (
            log_softmax(np.where(usable[:, None], each, 0).astype(np.float64)) for each in (engine, source)
        )
        kl = np.sum(np.exp(reference) * (reference - ours), axis=1)
        self._left_out += int((~usable).sum())
        self._kl.append(kl[usable])
        self._agree.append((ours.argmax(axis=1) == reference.argmax(axis=1))[usable])
        count, length = sequences.shape
        rows = np.arange(count * length).reshape(count, length)[:, :-1].reshape(-1)
        following = sequences[:, 1:].reshape(-1)
        counted = usable[rows]
        rows, following = rows[counted], following[counted]
        self._surprise.append(-np.stack([ours[rows, following], reference[rows, following]]))

    def metrics(self) -> LogitMetrics:
        """The metrics of everything so far."""
        kl, agree = np.concatenate(self._kl), np.concatenate(self._agree)
        surprise = np.concatenate(self._surprise, axis=1)
        has_perplexity = self._is_text and surprise.size > 0
        ours, reference = np.exp(surprise.mean(axis=1)).tolist() if has_perplexity else (None, None)
        return LogitMetrics(
            positions=len(kl),
            left_out=self._left_out,
            kl_mean=float(kl.mean()) if len(kl) else None,
            kl_max=float(kl.max()) if len(kl) else None,
            top1_agreement=float(agree.mean()) if len(kl) else None,
            perplexity=ours,
            source_perplexity=reference,
        )


def log_softmax(logits: Float64) -> Float64:
    """Row by row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
