"""Steps of decoding requests that follow each other in one crossing, while others read what has come so far.

session   step 0 ─ step 1 ─ step 2 ─ step 3 ─ step 4 ─ the last one
             └────────┤        └────────┤             └── run() ──▶ a StepResult, as of any other step
requests         catch_up()         catch_up()
"""

from ingot.runtime.request import Request
from ingot.runtime.step_batch import ScheduledStep, repeat_of
from ingot.step_io import Int32, RepeatSession, StepResult


class Repetition:
    """One crossing. `run` takes its time; `catch_up` is called with the executor's lock held.

    taken  steps whose tokens the requests have
    """

    def __init__(self, step: ScheduledStep, first: int, *, most: int, seconds: float, stop: Int32) -> None:
        """At most `most` steps, none that begins after `seconds`, and none after the one in which `stop` becomes 1.

        first  the executor's number of the first step
        """
        self._step, self._first, self.taken = step, first, 0
        self._repeat = repeat_of(step.chunks, most, seconds, stop)

    @property
    def done(self) -> int:
        """Steps that have ended and are not the last."""
        return int(self._repeat.done[0])

    def run(self, session: RepeatSession) -> StepResult:
        """Run all steps; the last one's result, as if it had been the only one."""
        last = session.decode(self._step.batch, self._repeat) - 1
        return StepResult(ids=self._repeat.ids[last], log_probs=self._repeat.log_probs[last])

    def catch_up(self) -> None:
        """Give the requests what they do not have yet of the steps that are `done`."""
        done = self.done
        if done == self.taken:
            return
        new = slice(self.taken, done)
        tokens, log_probs = self._repeat.ids[new].T, self._repeat.log_probs[new].T.tolist()
        requests: tuple[Request, ...] = self._step.sampled
        for request, own_tokens, own_log_probs in zip(requests, tokens, log_probs, strict=True):
            if request.finish_reason is None:
                request.catch_up(own_tokens, own_log_probs, self._first + self.taken)
        self.taken = done
