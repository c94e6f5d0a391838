"""Requests → the arrays that `ModelRunner.generate` returns."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.runtime.logprobs import as_tables
from ingot.runtime.request import Request
from ingot.step_io import Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which parts of the result a call asked for."""

    as_dict: bool = False
    log_probs: bool = False
    cum_log_probs: bool = False
    generation_logits: bool = False
    context_logits: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        asked = any(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "as_dict")
        if asked and not self.as_dict:
            raise RequestError(
                "log probabilities and logits are part of the dictionary", expected="return_dict=True",
                hint="add return_dict=True, or leave the output_... arguments out",
            )  # fmt: skip


class Outputs:
    """All requests of one call: groups[prompt][sequence]. Reads their state, finished or not, while steps go on."""

    def __init__(
        self,
        *,
        groups: Sequence[Sequence[Request]],
        num_return_sequences: int,
        wanted: Wanted,
        pad_id: int,
        vocab_size: int,
    ) -> None:
        self.groups, self.num_return_sequences = groups, num_return_sequences
        self.wanted, self.pad_id, self.vocab_size = wanted, pad_id, vocab_size
        self.requests = [request for group in groups for request in group]
        self._ids: Int32 = np.empty((len(self.requests), 0), dtype=np.int32)
        self._copied = [0] * len(self.requests)  # tokens of each request in its row of _ids

    def collect(self, shown: Sequence[int] | None = None) -> Int32 | dict[str, Any]:
        """The result in arrays of its own: output_ids, or the dictionary of the contract.

        shown  generated tokens of each request that are part of it; None: all there are
        """
        if shown is None:
            shown = [request.num_generated for request in self.requests]
        ids = self._output_ids(shown)
        if not self.wanted.as_dict:
            return ids
        lengths = [request.num_prompt + count for request, count in zip(self.requests, shown, strict=True)]
        reasons = [_reason(request, count) for request, count in zip(self.requests, shown, strict=True)]
        result: dict[str, Any] = {
            "output_ids": ids,
            "sequence_lengths": np.array(lengths, dtype=np.int32).reshape(ids.shape[:2]),
            "finish_reasons": self._grouped(reasons),
        }
        if self.wanted.log_probs:
            result["log_probs"] = self._per_token([request.log_probs for request in self.requests], shown, ())
        if self.wanted.log_probs or self.wanted.cum_log_probs:
            sums = [sum(request.log_probs[:count]) for request, count in zip(self.requests, shown, strict=True)]
            result["cum_log_probs"] = np.array(sums, dtype=np.float32).reshape(ids.shape[:2])
        if self.wanted.generation_logits:
            rows = [request.generation_logits for request in self.requests]
            result["generation_logits"] = self._per_token(rows, shown, (self.vocab_size,))
        if self.wanted.context_logits:
            nothing = np.empty((0, self.vocab_size), dtype=np.float32)
            result["context_logits"] = [np.concatenate([nothing, *group[0].context_logits]) for group in self.groups]
        if self.wanted.logprobs:
            tables = [as_tables(r.token_probs[:count]) for r, count in zip(self.requests, shown, strict=True)]
            result["logprobs"] = self._grouped(tables)
        if self.wanted.prompt_logprobs:
            result["prompt_logprobs"] = [[None, *as_tables(group[0].prompt_probs)] for group in self.groups]
        return result

    def _grouped(self, values: Sequence[Any]) -> list[list[Any]]:
        """One value per request → as in `groups`."""
        following = iter(values)
        return [[next(following) for _ in group] for group in self.groups]

    def _output_ids(self, shown: Sequence[int]) -> Int32:
        """int32 [batch, num_return_sequences, longest]: prompt, generated tokens, pad_id.

        Only what is new is copied from the requests: whoever streams asks after every step.
        """
        ends = [request.num_prompt + count for request, count in zip(self.requests, shown, strict=True)]
        longest = max(ends, default=0)
        if longest > self._ids.shape[1]:
            wider = np.full((len(self.requests), longest + longest // 4 + 64), self.pad_id, dtype=np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider
        for place, (request, end) in enumerate(zip(self.requests, ends, strict=True)):
            begin = self._copied[place]
            if begin < end:
                self._ids[place, begin:end] = request.tokens[begin:end]
                self._copied[place] = end
        shape = (len(self.groups), self.num_return_sequences, longest)
        return self._ids[:, :longest].copy().reshape(shape)

    def _per_token(
        self, kept: Sequence[Sequence[Any]], shown: Sequence[int], tail: tuple[int, ...]
    ) -> npt.NDArray[np.float32]:
        """float32 [batch, num_return_sequences, max_new_tokens, *tail], zeros where nothing was generated."""
        steps = max((request.max_new_tokens for request in self.requests), default=0)
        values = np.zeros((len(self.requests), steps, *tail), dtype=np.float32)
        for row, own, count in zip(values, kept, shown, strict=True):
            if count:
                row[:count] = own[:count]
        return values.reshape(len(self.groups), self.num_return_sequences, steps, *tail)


def _reason(request: Request, count: int) -> str | None:
    """Why a request had ended when it had generated `count` tokens."""
    if request.finish_reason is None or count < request.num_generated:
        return None
    return request.finish_reason.value
