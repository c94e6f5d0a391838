"""Requests → the arrays that `ModelRunner.generate` returns."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.configs.sampling import check_flag
from ingot.errors import RequestError
from ingot.runtime.logprobs import LogprobTable, as_tables
from ingot.runtime.request import Request
from ingot.step_io import Float32, Int32


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
        for field in dataclasses.fields(self):
            check_flag("return_dict" if field.name == "as_dict" else f"output_{field.name}", getattr(self, field.name))
        asked = any(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "as_dict")
        if asked and not self.as_dict:
            raise RequestError(
                "log probabilities and logits are returned only in a dictionary",
                expected="return_dict=True",
                hint="add return_dict=True, or leave the output_... arguments out",
            )


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
        self._prompts: Int32 = np.array([request.num_prompt for request in self.requests], dtype=np.int32)
        self._copied: Int32 = np.zeros(len(self.requests), dtype=np.int32)  # tokens of each request in its row of _ids
        self._log_probs: Float32 = np.zeros(
            (len(self.requests), max((request.max_new_tokens for request in self.requests), default=0)), np.float32
        )
        self._summed = [0] * len(self.requests)  # tokens whose log probabilities are there, and in _sums
        self._sums = [0.0] * len(self.requests)
        self._tables: list[list[LogprobTable]] = [[] for _ in self.requests]

    def collect(self, shown: Sequence[int] | None = None) -> Int32 | dict[str, Any]:
        """The result in arrays of its own: output_ids, or the dictionary of the contract. What is kept between calls
        makes each of them cost what is new: streams ask after every step.

        shown  generated tokens of each request that are part of it, never fewer than before; None: all there are
        """
        if shown is None:
            shown = [request.num_generated for request in self.requests]
        ids = self._output_ids(shown)
        if not self.wanted.as_dict:
            return ids
        reasons = [
            None if request.finish_reason is None else _reason(request, count)
            for request, count in zip(self.requests, shown, strict=True)
        ]
        result: dict[str, Any] = {
            "output_ids": ids,
            "sequence_lengths": self._copied.reshape(ids.shape[:2]).copy(),  # as `_output_ids` has left it
            "finish_reasons": self._grouped(reasons),
        }
        if self.wanted.log_probs or self.wanted.cum_log_probs:
            self._sum_log_probs(shown)
            result["cum_log_probs"] = np.array(self._sums, dtype=np.float32).reshape(ids.shape[:2])
        if self.wanted.log_probs:
            result["log_probs"] = self._log_probs.copy().reshape(*ids.shape[:2], self._log_probs.shape[1])
        if self.wanted.generation_logits:
            result["generation_logits"] = self._generation_logits(shown)
        if self.wanted.context_logits:
            nothing = np.empty((0, self.vocab_size), dtype=np.float32)
            result["context_logits"] = [np.concatenate([nothing, *group[0].context_logits]) for group in self.groups]
        if self.wanted.logprobs:
            for request, count, tables in zip(self.requests, shown, self._tables, strict=True):
                tables += as_tables(request.token_probs[len(tables) : count])
            result["logprobs"] = self._grouped([tables.copy() for tables in self._tables])
        if self.wanted.prompt_logprobs:
            result["prompt_logprobs"] = [[None, *as_tables(group[0].prompt_probs)] for group in self.groups]
        return result

    def _grouped(self, values: Sequence[Any]) -> list[list[Any]]:
        """One value per request → as in `groups`."""
        if self.num_return_sequences == 1:
            return [[value] for value in values]
        following = iter(values)
        return [[next(following) for _ in group] for group in self.groups]

    def _output_ids(self, shown: Sequence[int]) -> Int32:
        """int32 [batch, num_return_sequences, longest]: prompt, generated tokens, pad_id."""
        ends = self._prompts + np.array(shown, dtype=np.int32)
        longest = int(ends.max(initial=0))
        if longest > self._ids.shape[1]:
            wider = np.full((len(self.requests), longest + longest // 4 + 64), self.pad_id, dtype=np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider
        new = ends - self._copied
        for place in np.flatnonzero(new > 1).tolist():
            begin, end = self._copied[place], ends[place]
            self._ids[place, begin:end] = self.requests[place].tokens[begin:end]
        (single,) = np.nonzero(new == 1)
        last = ends[single] - 1
        own = zip(single.tolist(), last.tolist(), strict=True)
        self._ids[single, last] = [self.requests[place].tokens[token] for place, token in own]
        self._copied = ends
        shape = (len(self.groups), self.num_return_sequences, longest)
        return self._ids[:, :longest].copy().reshape(shape)

    def _sum_log_probs(self, shown: Sequence[int]) -> None:
        for place, (request, end) in enumerate(zip(self.requests, shown, strict=True)):
            begin = self._summed[place]
            if begin < end:
                new = request.log_probs[begin:end]
                self._log_probs[place, begin:end] = new
                for value in new:  # not sum(), whose rounding would depend on how many came at a time
                    self._sums[place] += value
                self._summed[place] = end

    def _generation_logits(self, shown: Sequence[int]) -> Float32:
        """float32 [batch, num_return_sequences, max_new_tokens, vocab], zeros where nothing was generated."""
        steps = self._log_probs.shape[1]
        values = np.zeros((len(self.requests), steps, self.vocab_size), dtype=np.float32)
        for row, request, count in zip(values, self.requests, shown, strict=True):
            if count:
                row[:count] = request.generation_logits[:count]
        return values.reshape(len(self.groups), self.num_return_sequences, steps, self.vocab_size)


def _reason(request: Request, count: int) -> str | None:
    """Why a request had ended when it had generated `count` tokens."""
    if request.finish_reason is None or count < request.num_generated:
        return None
    return request.finish_reason.value
