"""Per-request sampling parameters → the arrays that a Session draws with."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.runtime.request import Request
from ingot.runtime.rules import NO_RULES
from ingot.step_io import DrawRules, Float32, Int32, ProbRows, SampleRows

_SEEDS = 2**64


def request_seed(seed: int | None, index: int) -> int:
    """Seed of the index-th completion of a prompt: seed + index, or a random one where none was given."""
    return secrets.randbits(64) if seed is None else (int(seed) + index) % _SEEDS


def sample_rows(
    requests: Sequence[Request], rows: Sequence[int], known: Sequence[tuple[Request, int, int]] = ()
) -> SampleRows:
    """One draw for each request, from row rows[i] of the step's logits, then one for each of `known`.

    The counter is the number of tokens the request has generated, so that a draw depends on nothing but its request.

    known  (request, row, token): the probability of a prompt token is wanted, nothing is drawn
    """
    idle = [0] * len(known)
    wants_probs = bool(known) or any(request.logprobs is not None for request in requests)
    return SampleRows(
        row=np.array([*rows, *(row for _, row, _ in known)], dtype=np.int32),
        temperature=np.array([*(request.temperature for request in requests), *idle], dtype=np.float32),
        top_k=np.array([*(request.top_k for request in requests), *idle], dtype=np.int32),
        top_p=np.array([*(request.top_p for request in requests), *(1 for _ in known)], dtype=np.float32),
        seed=np.array([*(request.seed for request in requests), *idle], dtype=np.uint64),
        counter=np.array([*(request.num_generated for request in requests), *idle], dtype=np.uint64),
        rules=_rules(requests, len(known)) if any(request.rules is not NO_RULES for request in requests) else None,
        probs=_probs(requests, known) if wants_probs else None,
        log_probs=np.array([*(request.want_log_probs for request in requests), *(True for _ in known)], dtype=np.bool_),
    )


def next_draws(before: SampleRows, requests: Sequence[Request], rows: Int32) -> SampleRows:
    """The draws after `before`, of the same requests in the same order: rows[i] of the step's logits for request i."""
    return SampleRows(
        row=rows,
        temperature=before.temperature,
        top_k=before.top_k,
        top_p=before.top_p,
        seed=before.seed,
        counter=np.array([request.num_tokens - request.num_prompt for request in requests], dtype=np.uint64),
        rules=None if before.rules is None else _next_rules(before.rules, requests),
        probs=before.probs,
        log_probs=before.log_probs,
    )


def _next_rules(before: DrawRules, requests: Sequence[Request]) -> DrawRules:
    """The same: only what the last token changed is made anew."""
    rules = before
    if len(before.history):
        history_starts, history = _histories(requests, 0)
        rules = dataclasses.replace(rules, history_starts=history_starts, history=history)
    if not all([request.rules.lasting for request in requests]):
        rules = dataclasses.replace(rules, **_biases(requests, 0))
    return rules


def _rules(requests: Sequence[Request], num_known: int) -> DrawRules:
    """The rules of each request's next draw; none for the known tokens behind them."""
    rules = [request.rules for request in requests] + [NO_RULES] * num_known
    history_starts, history = _histories(requests, num_known)
    return DrawRules(
        min_p=_floats([rule.min_p for rule in rules]),
        repetition_penalty=_floats([rule.repetition_penalty for rule in rules]),
        frequency_penalty=_floats([rule.frequency_penalty for rule in rules]),
        presence_penalty=_floats([rule.presence_penalty for rule in rules]),
        history_starts=history_starts,
        history=history,
        num_prompt=np.array([r.num_prompt if r.rules.penalises else 0 for r in requests] + [0] * num_known, np.int32),
        **_biases(requests, num_known),
    )


def _histories(requests: Sequence[Request], num_known: int) -> tuple[Int32, Int32]:
    """Where each begins and the last one ends, and all of them."""
    nothing: Int32 = np.empty(0, dtype=np.int32)
    histories = [r.tokens[: r.num_tokens] if r.rules.penalises else nothing for r in requests] + [nothing] * num_known
    return _starts(histories), np.concatenate([nothing, *histories])


def _biases(requests: Sequence[Request], num_known: int) -> dict[str, Any]:
    """Those fields of the rules."""
    biases = [request.biases() for request in requests]
    nothing: Int32 = np.empty(0, dtype=np.int32)
    bias_ids = [ids for ids, _ in biases] + [nothing] * num_known
    return {
        "bias_starts": _starts(bias_ids),
        "bias_ids": np.concatenate([nothing, *bias_ids]),
        "bias": np.concatenate([_floats([]), *(values for _, values in biases)]),
    }


def _probs(requests: Sequence[Request], known: Sequence[tuple[Request, int, int]]) -> ProbRows:
    wanted = [request.logprobs or 0 for request in requests]
    wanted += [request.prompt_logprobs or 0 for request, _, _ in known]
    return ProbRows(
        given=np.array([-1] * len(requests) + [token for _, _, token in known], dtype=np.int32),
        top_starts=np.cumsum([0, *wanted]).astype(np.int32),
    )


def _floats(values: Sequence[float]) -> Float32:
    return np.array(values, dtype=np.float32)


def _starts(parts: Sequence[npt.NDArray[np.int32]]) -> Int32:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
