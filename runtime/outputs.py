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
    """All requests of one call: groups[prompt][sequence]. Reads their present state, finished or not."""

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

    def collect(self) -> Int32 | dict[str, Any]:
        """The result so far, in arrays of its own: output_ids, or the dictionary of the contract."""
        ids = self._output_ids()
        if not self.wanted.as_dict:
            return ids
        lengths = [[request.num_tokens for request in group] for group in self.groups]
        result: dict[str, Any] = {
            "output_ids": ids,
            "sequence_lengths": np.array(lengths, dtype=np.int32).reshape(ids.shape[:2]),
            "finish_reasons": [
                [request.finish_reason.value if request.finish_reason else None for request in group]
                for group in self.groups
            ],
        }
        if self.wanted.log_probs:
            result["log_probs"] = self._per_token(())
        if self.wanted.log_probs or self.wanted.cum_log_probs:
            sums = [[sum(request.log_probs) for request in group] for group in self.groups]
            result["cum_log_probs"] = np.array(sums, dtype=np.float32).reshape(ids.shape[:2])
        if self.wanted.generation_logits:
            result["generation_logits"] = self._per_token((self.vocab_size,))
        if self.wanted.context_logits:
            nothing = np.empty((0, self.vocab_size), dtype=np.float32)
            result["context_logits"] = [np.concatenate([nothing, *group[0].context_logits]) for group in self.groups]
        if self.wanted.logprobs:
            result["logprobs"] = [[as_tables(request.token_probs) for request in group] for group in self.groups]
        if self.wanted.prompt_logprobs:
            result["prompt_logprobs"] = [[None, *as_tables(group[0].prompt_probs)] for group in self.groups]
        return result

    def _output_ids(self) -> Int32:
        """int32 [batch, num_return_sequences, longest]: prompt, generated tokens, pad_id.

        Only what is new is copied from the requests: whoever streams asks after every step.
        """
        longest = max([request.num_tokens for request in self.requests], default=0)
        if longest > self._ids.shape[1]:
            wider = np.full((len(self.requests), longest + longest // 4 + 64), self.pad_id, dtype=np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider
        for place, request in enumerate(self.requests):
            begin, end = self._copied[place], request.num_tokens
            if begin < end:
                self._ids[place, begin:end] = request.tokens[begin:end]
                self._copied[place] = end
        shape = (len(self.groups), self.num_return_sequences, longest)
        return self._ids[:, :longest].copy().reshape(shape)

    def _per_token(self, tail: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """float32 [batch, num_return_sequences, max_new_tokens, *tail], zeros where nothing was generated."""
        steps = max((request.max_new_tokens for group in self.groups for request in group), default=0)
        values = np.zeros((len(self.groups), self.num_return_sequences, steps, *tail), dtype=np.float32)
        for rows, group in zip(values, self.groups, strict=True):
            for row, request in zip(rows, group, strict=True):
                kept = request.generation_logits if tail else request.log_probs
                if kept:
                    row[: len(kept)] = kept
        return values
