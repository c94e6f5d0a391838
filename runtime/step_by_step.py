"""What every step brought to some requests, while the steps after it are already computed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from ingot.runtime.executor import Executor
from ingot.runtime.request import Request

_LEAD = 16  # steps that follow each other ahead of who looks at each of them


class StepsAhead(threading.Thread):
    """Inside its context, steps run on this thread as long as there are requests, whatever the caller does.

    lead  how many steps may follow each other now; 0: none before a result of `Executor.wait`; None: any number
    """

    def __init__(self, executor: Executor, lead: Callable[[], int] | None = None) -> None:
        super().__init__(name="ingot steps", daemon=True)
        self._executor, self._lead, self._over = executor, lead, False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """For the thread."""
        allowed = {} if self._lead is None else {"most": self._lead}
        try:
            self._executor.run_until(lambda: self._over, **allowed)
        except BaseException as error:  # whoever waits for tokens must not wait for ever
            self._failure = error
            self._executor.wake()

    def failed(self) -> bool:
        """Whether no more steps will come."""
        return self._failure is not None

    def __enter__(self) -> "StepsAhead":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread ends after the step that runs. Raises what ended it before its time."""
        self._over = True
        self._executor.wake()
        if kind is not GeneratorExit:  # which the garbage collector may bring, whatever locks its thread holds
            self.join()
        if self._failure is not None and error is None:
            raise self._failure


def step_by_step(executor: Executor, requests: Sequence[Request]) -> Iterator[list[int]]:
    """Queue requests; how many tokens each has generated, after every step that brought one of them a token or its end.

    Some steps are run ahead of the caller: not many more than it has seen, and at most twice `_LEAD`. Dropping the
    iterator aborts what still runs.
    """
    came: list[list[int]] = [[] for _ in requests]
    for request, steps in zip(requests, came, strict=True):
        request.steps = steps
    shown, known, told = [0] * len(requests), [0] * len(requests), 0

    def lengths() -> list[int]:
        return [len(steps) for steps in came]

    def ended() -> int:
        return sum([request.finish_reason is not None for request in requests])

    def moved() -> bool:
        return lengths() != shown or ended() != told or ahead.failed()

    def take() -> int:
        known[:] = lengths()
        return ended()

    def lead() -> int:
        most = max(1, min([_LEAD, *known]))
        return most if all([came - seen <= most for came, seen in zip(lengths(), known, strict=True)]) else 0

    executor.add(requests)
    try:
        with StepsAhead(executor, lead) as ahead:
            while told < len(requests) and not ahead.failed():
                now_ended = executor.wait(moved, take, steps=False)
                while shown != known:
                    step = min([steps[n] for steps, n, end in zip(came, shown, known, strict=True) if n < end])
                    shown = [
                        n + (n < end and steps[n] == step) for steps, n, end in zip(came, shown, known, strict=True)
                    ]
                    if shown == known:
                        told = now_ended
                    yield shown
                if told != now_ended:  # without a token
                    told = now_ended
                    yield shown
    finally:
        executor.abort(requests)
