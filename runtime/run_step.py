"""One step through the Session, and the only place where logits cross to Python: for logits processors of requests."""

import dataclasses
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ingot.errors import IngotError
from ingot.runtime.logits_rules import process
from ingot.runtime.request import Request
from ingot.runtime.step_batch import ScheduledStep, tops
from ingot.step_io import Ahead, Float32, Int32, Session, StepResult

Number = TypeVar("Number", np.int32, np.float32)

Outcome = tuple[ScheduledStep, StepResult | IngotError]


def run_step(session: Session, step: ScheduledStep, ahead: Ahead | None = None) -> list[Outcome]:
    """The step and its result; before it, alone, each request whose logits processor failed."""
    result = session.run(step.batch, ahead)
    if not step.processed:
        return [(step, result)]
    assert result.logits is not None, "assemble asks for the logits that processors need"
    place = len(step.sampled) - len(step.processed)
    failed: list[Outcome] = []
    good: dict[Request, int] = {}
    processed: list[Float32] = []
    for request, row in zip(step.sampled[place:], step.processed, strict=True):
        tokens = request.tokens[: request.num_tokens].tolist()
        prompt, generated = tokens[: request.num_prompt], tokens[request.num_prompt :]
        try:
            processed.append(process(request.rules, prompt, generated, result.logits[row]))
        except IngotError as error:
            failed.append((dataclasses.replace(step, chunks={request: step.chunks[request]}), error))
        else:
            good[request] = row
    step = dataclasses.replace(step, sampled=(*step.sampled[:place], *good), processed=tuple(good.values()))
    if good:
        slots = np.array([request.slot for request in good], dtype=np.int32)
        drawn = session.draw(slots, np.stack(processed), result.logits[list(good.values())])
        result = _joined(result, drawn, place, sum(tops(step)[:place]))
    return [*failed, (step, result)]


def _joined(result: StepResult, drawn: StepResult, place: int, top_place: int) -> StepResult:
    """`result` with other draws at `place`, and their most likely tokens at `top_place`."""
    joined = dataclasses.replace(
        result,
        ids=_inserted(result.ids, drawn.ids, place),
        log_probs=_inserted(result.log_probs, drawn.log_probs, place),
        ends=np.concatenate([result.ends, drawn.ends]),
    )
    if result.token_ranks is None and drawn.token_ranks is None:
        return joined
    mine, theirs = (_with_probs(each) for each in (result, drawn))
    return dataclasses.replace(
        joined,
        token_ranks=_inserted(mine[0], theirs[0], place),
        top_ids=_inserted(mine[1], theirs[1], top_place),
        top_log_probs=_inserted(mine[2], theirs[2], top_place),
    )


def _with_probs(result: StepResult) -> tuple[Int32, Int32, Float32]:
    """Ranks, most likely tokens and their log probabilities; ranks of 0 and no tokens where nobody wants any."""
    if result.token_ranks is None or result.top_ids is None or result.top_log_probs is None:
        none = result.ids[:, :0]
        return np.zeros_like(result.ids), none, none.astype(np.float32)
    return result.token_ranks, result.top_ids, result.top_log_probs


def _inserted(array: npt.NDArray[Number], other: npt.NDArray[Number], place: int) -> npt.NDArray[Number]:
    """Columns of `other` between those of `array`."""
    return np.concatenate([array[:, :place], other, array[:, place:]], axis=1)
