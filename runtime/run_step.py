"""One step through the Session, and the only place where logits cross to Python: for logits processors of requests."""

import dataclasses

import numpy as np

from ingot.errors import IngotError
from ingot.runtime.request import Request
from ingot.runtime.rules import process
from ingot.runtime.sampler import sample_rows
from ingot.runtime.step_batch import ScheduledStep
from ingot.step_io import Int32, ProbRows, Session, StepResult

Outcome = tuple[ScheduledStep, StepResult | IngotError]


def run_step(session: Session, step: ScheduledStep) -> list[Outcome]:
    """The step and its result; before it, alone, each request whose logits processor failed."""
    result = session.run(step.batch)
    places = [place for place, request in enumerate(step.sampled) if request.rules.processors]
    if not places:
        return [(step, result)]
    assert result.logits is not None, "assemble asks for the logits that processors need"
    failed: list[Outcome] = []
    processed, good = [], []
    for place in places:
        request = step.sampled[place]
        tokens = request.tokens[: request.num_tokens].tolist()
        prompt, generated = tokens[: request.num_prompt], tokens[request.num_prompt :]
        try:
            row = process(request.rules, prompt, generated, result.logits[step.batch.sample.row[place]])
        except IngotError as error:
            failed.append((dataclasses.replace(step, chunks={request: step.chunks[request]}), error))
        else:
            processed.append(row)
            good.append(place)
    if good:
        requests = [step.sampled[place] for place in good]
        drawn = session.draw(np.stack(processed), sample_rows(requests, range(len(good)))).ids
        result = _with_drawn(session, step, result, good, drawn)
    return [*failed, (step, result)]


def _with_drawn(
    session: Session, step: ScheduledStep, result: StepResult, places: list[int], drawn: Int32
) -> StepResult:
    """`result` with these tokens at these places, their probabilities and ranks under the raw logits."""
    assert result.logits is not None, "assemble asks for the logits that processors need"
    raw = result.logits[step.batch.sample.row[places]]
    requests: list[Request] = [step.sampled[place] for place in places]
    nothing = np.zeros(len(places) + 1, dtype=np.int32)
    given = dataclasses.replace(
        sample_rows(requests, range(len(places))), rules=None, probs=ProbRows(given=drawn, top_starts=nothing)
    )
    seen = session.draw(raw, given)
    ids, log_probs = result.ids.copy(), result.log_probs.copy()
    ids[places] = drawn
    log_probs[places] = np.where(drawn < 0, -np.inf, seen.log_probs)
    ranks = None if result.ranks is None else result.ranks.copy()
    if ranks is not None and seen.ranks is not None:
        ranks[places] = seen.ranks
    return dataclasses.replace(result, ids=ids, log_probs=log_probs, ranks=ranks)
