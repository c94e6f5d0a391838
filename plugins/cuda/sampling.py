"""The end of a step on a GPU: from logits in its memory to drawn tokens on the host.

sequences ─draws─▶ rows of integers + lists ─one copy─▶ kernel draw_tokens ─one copy─▶ tokens, probabilities, ranks
                                                          └ histories of sequences with penalties stay on the device

What else the sequences hold, words and grammars, is on the host (plugins/sequences.py).
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError, RequestError
from ingot.plan import Plan
from ingot.plugins.cuda.draw_rows import MOST_LIKELY, RESULT, ROW, WIDTH, DrawLayout, PlainRows, Round, rounds_of
from ingot.plugins.cuda.gpu import Argument, Arguments, Device, Kernel
from ingot.plugins.cuda.step_tables import within
from ingot.plugins.cuda.work import integer, pointer
from ingot.plugins.ops.sample import Draw, Drawn, log_softmax, ranking
from ingot.plugins.sequences import Drawing, Sequences, known_draws
from ingot.step_io import LAST_DRAWN, Float32, Int32, SequenceRules, StepBatch, StepResult

KERNELS = {"sample.f32.sm80": "draw_tokens"}  # of a plan → as the machine code names it

_INT = 4
_THREADS = 512
_NONE: Int32 = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDraws:
    """What a step draws, and for whom.

    counters  int32, of the plain sequences: the number of each one's draw
    others    draws of all other sequences, then of known tokens
    """

    drawing: Drawing
    counters: Int32
    others: Sequence[Draw]

    @property
    def places(self) -> Int32:
        """Where the results, which come in the order of rounds, stand in the order of draws."""
        num = len(self.drawing.slots)
        known = range(num, num + len(self.others) - len(self.drawing.others))
        return np.array([*self.drawing.plain.tolist(), *self.drawing.others, *known], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The draws of a step under way.

    step     what is drawn
    record   moves the sequences on
    logits   float32 [rows, vocab] where wanted; [0, vocab] elsewhere
    lines    those of draws whose most likely tokens the host sorts
    rounds   draws of each round, and the integers that come back of them: of the last round when `event` has come
    """

    step: StepDraws
    record: Callable[[Drawn], StepResult]
    logits: Float32 | None
    lines: Sequence[Float32]
    rounds: Sequence[tuple[int, Int32]]
    event: Any


def draw_kernel(plan: Plan) -> str:
    """What draws tokens, as the machine code names it. Raises EngineError for a kernel that is not here."""
    if (found := KERNELS.get(plan.draw_kernel)) is None:
        raise EngineError(
            "the plan names a kernel that this version of ingot does not have",
            where="plan: draw_kernel",
            expected=" or ".join(KERNELS),
            got=plan.draw_kernel or "none",
            hint=REBUILD,
        )
    return found


class Sampler:
    """The sequences of one session, and what the kernel needs of them on the device.

    Two steps may be under way, so memory that the device copies from and to is there twice.
    """

    def __init__(self, device: Device, kernel: Kernel, plan: Plan, drawn_at: int) -> None:
        """drawn_at: int32 [max_batch_size] on the device, see Addresses."""
        self._device, self._kernel, self._layout, self._drawn_at = device, kernel, DrawLayout.of(plan), drawn_at
        self._sequences = Sequences()
        layout = self._layout
        self._plain_rows = PlainRows(layout)
        self._last: tuple[int, tuple[Int32, ...], Drawing] | None = None  # what `_drawing` found, and for what
        self._arguments: tuple[tuple[int, int, int], Arguments] | None = None  # of the last launch
        self._turn = 0
        self._to_send = [device.pinned(_INT * layout.sent).view(np.int32) for _ in range(2)]
        self._fetched = [device.pinned(_INT * layout.results).view(np.int32) for _ in range(2)]
        self._events = [device.event() for _ in range(2)]
        self._sent_at = device.allocate(_INT * layout.sent)
        self._results_at = device.allocate(_INT * layout.results)
        self._histories_at = device.allocate(_INT * layout.slots * layout.history)
        self.lines_at = device.allocate(_INT * layout.lines * layout.vocab)
        self._counts_at = device.allocate(_INT * layout.lines * layout.vocab)
        device.upload(self._counts_at, np.zeros(layout.lines * layout.vocab, np.int32))

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """See Session.start. Raises RequestError for what kernels, which check nothing, could not take."""
        self._check(slot, rules, tokens)
        self._sequences.start(slot, rules, tokens, num_prompt)
        if slot in self._sequences.plain.rules:
            self._plain_rows.start(slot, rules, num_prompt)
        if rules.penalises:
            self._device.enter()
            self._device.upload(self._history(slot), np.ascontiguousarray(tokens, np.int32))

    def end(self, slot: int) -> None:
        """See Session.end."""
        self._sequences.end(slot)

    def complete(self, batch: StepBatch) -> StepBatch:
        """The batch with the tokens that it leaves to the session; -1 - slot for those that the device alone knows."""
        if (batch.ids < LAST_DRAWN).any():
            raise RequestError("a token id of the batch is out of range", got=f"token {batch.ids.min()}")
        return self._sequences.complete(batch)

    def of_step(self, batch: StepBatch) -> StepDraws:
        """The draws of a step. Raises RequestError where one cannot be."""
        drawing, known, vocab = self._drawing(batch), batch.known, self._layout.vocab
        if known is not None and not (within(known.token, vocab) and within(known.top, vocab + 1)):
            raise RequestError(
                "a token whose probability is asked for, or the number of most likely tokens, is out of range",
                expected=f"token ids below {vocab}, at most {vocab} most likely tokens",
            )
        counters = self._sequences.plain.counters(drawing.plain_slots)
        if not drawing.others and known is None:
            return StepDraws(drawing=drawing, counters=counters, others=())
        rows = batch.draws[drawing.others].tolist()
        others = [each.draw(row) for row, each in zip(rows, drawing.held, strict=True)]
        longest = max((draw.num_prompt + draw.counter for draw in others if draw.rules.penalises), default=0)
        if longest >= self._layout.history:
            raise RequestError("a sequence has more tokens than the engine is built for", got=str(longest))
        return StepDraws(drawing=drawing, counters=counters, others=others + known_draws(batch))

    def _drawing(self, batch: StepBatch) -> Drawing:
        """Who draws: found once for steps of the same sequences, as long as none begins or ends."""
        changes, arrays = self._sequences.changes, (batch.slots, batch.query_starts, batch.logit_rows, batch.draws)
        last = self._last
        if last is None or last[0] != changes or not all(map(operator.is_, last[1], arrays)):
            self._last = last = changes, arrays, self._sequences.drawing(batch)
        return last[2]

    def submit(self, batch: StepBatch, step: StepDraws, logits_at: int) -> Submitted:
        """Enqueue the draws of a step behind it. logits_at: float32 [wanted rows, vocab] on the device."""
        self._turn = 1 - self._turn
        logits = None
        if batch.want_logits:
            logits = np.empty((len(batch.logit_rows), self._layout.vocab), np.float32)
            self._device.fetch(logits, logits_at)
        long = [draw.row for draw in step.others if (draw.rules.top or 0) > MOST_LIKELY]
        lines = [np.empty(self._layout.vocab, np.float32) for _ in long]
        for row, line in zip(long, lines, strict=True):
            self._device.fetch(line, logits_at + line.nbytes * row)
        rounds: list[tuple[int, Int32]] = []
        drawing = step.drawing
        others = drawing.slots[drawing.others].tolist() if drawing.others else []
        others += [-1] * (len(step.others) - len(others))
        for each in rounds_of(len(drawing.plain), step.others, others, self._layout):
            if rounds:  # the memory of the round before it is used again
                self._device.wait()
                rounds[-1] = rounds[-1][0], rounds[-1][1].copy()
            self._put_plain(each, step, batch.draws)
            rounds.append((each.count, self._enqueue(each, logits_at)))
        event = self._events[self._turn]
        self._device.record(event)
        record = self._sequences.submit_drawing(drawing)
        return Submitted(step=step, record=record, logits=logits, lines=lines, rounds=rounds, event=event)

    def finish(self, submitted: Submitted) -> StepResult:
        """Wait for a step, and move its sequences on."""
        self._device.wait_for(submitted.event)
        split = [(found[: RESULT * count], found[RESULT * count :]) for count, found in submitted.rounds]
        columns = _joined([rows for rows, _ in split]).reshape(-1, RESULT).T
        if submitted.step.others:
            in_order = np.empty_like(columns)
            in_order[:, submitted.step.places] = columns
            columns = in_order
        ids, log_probs, token_ranks = columns.copy()
        wants = any(draw.rules.top is not None for draw in submitted.step.others)
        drawn = Drawn(ids=ids, log_probs=log_probs.view(np.float32), token_ranks=token_ranks if wants else None)
        if wants:
            top_ids, top_log_probs = _tops(submitted, _joined([tops for _, tops in split]))
            drawn = dataclasses.replace(drawn, top_ids=top_ids, top_log_probs=top_log_probs)
        result = submitted.record(drawn)
        return result if submitted.logits is None else dataclasses.replace(result, logits=submitted.logits)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """See Session.draw: the logits are on the host, and so is the draw."""
        result = self._sequences.draw(slots, logits, raw)
        self._device.enter()
        for slot, token in zip(slots.tolist(), result.ids[0].tolist(), strict=True):
            place = len(self._sequences.history(slot)) - 1
            if token >= 0 and 0 <= place < self._layout.history:
                self._device.upload(self._history(slot) + _INT * place, np.array([token], np.int32))
        return result

    def _history(self, slot: int) -> int:
        return self._histories_at + _INT * slot * self._layout.history

    def _check(self, slot: int, rules: SequenceRules, tokens: Int32) -> None:
        vocab = self._layout.vocab
        named = [token for token, _ in rules.logit_bias] + [word[-1] for word in rules.bad_words if word]
        named += [*rules.end_ids, *rules.reasoning_end] if rules.min_tokens or rules.guided else []
        wrong = next((token for token in named if not 0 <= token < vocab), None)
        if not within(tokens, vocab):
            wrong = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
        problem = None
        if wrong is not None:
            problem = f"a token is {wrong}, expected 0 to {vocab - 1}"
        elif len(rules.logit_bias) > vocab or not all(rules.bad_words):
            problem = "there are more biases than tokens, or a bad word has no token"
        elif not 0 <= (rules.top or 0) <= vocab:
            problem = f"of {vocab} tokens, {rules.top} are wanted"
        elif not 0 <= slot < self._layout.slots:
            problem = f"slot {slot} of {self._layout.slots}"
        elif len(tokens) >= self._layout.history:
            problem = f"{len(tokens)} tokens, of which there may be {self._layout.history - 1}"
        if problem is not None:
            raise RequestError("the session cannot hold this sequence", got=problem)

    def _put_plain(self, each: Round, step: StepDraws, rows: Int32) -> None:
        """The first rows of a round. rows: of logits, of all draws."""
        begin, end = each.plain
        if begin == end:
            return
        drawing, to = step.drawing, self._to_send[self._turn][: WIDTH * (end - begin)]
        if step.others:
            rows = rows[drawing.plain]
        self._plain_rows.put(to, drawing.plain_slots[begin:end], rows[begin:end], step.counters[begin:end])

    def _enqueue(self, each: Round, logits_at: int) -> Int32:
        """What will hold the results of a round, whose first rows are written: those of each draw, then the most likely
        tokens."""
        count, to_send = each.count, self._to_send[self._turn]
        end = WIDTH * count
        if each.rows:
            rows = np.array(each.rows, ROW)
            rows["top"] += RESULT * count
            to_send[WIDTH * each.num_plain : end] = rows.view(np.int32)
        for part in each.lists:
            to_send[end : end + len(part)] = part
            end += len(part)
        self._device.send(self._sent_at, to_send[:end])
        first = 0
        for number in each.launches:
            self._launch(first, number, self._sent_at + _INT * WIDTH * count, logits_at)
            first += number
        found = self._fetched[self._turn][: RESULT * count + 2 * each.tops]
        self._device.fetch(found, self._results_at)
        return found

    def _launch(self, first: int, number: int, lists_at: int, logits_at: int) -> None:
        key = first, lists_at, logits_at
        if self._arguments is None or self._arguments[0] != key:
            before = self._results_at, logits_at, self._sent_at, lists_at, self._drawn_at, self._histories_at
            values: list[Argument] = [
                *[pointer(address) for address in before],
                integer(self._layout.history),
                *[pointer(address) for address in (self.lines_at, self._counts_at)],
                *[integer(value) for value in (first, self._layout.vocab)],
            ]
            self._arguments = key, Arguments(values)
        self._device.launch(self._kernel, (number, 1, 1), _THREADS, 0, self._arguments[1])


def _tops(submitted: Submitted, found: Int32) -> tuple[Int32, Float32]:
    """The most likely tokens of each draw, and their log probabilities: those found on the device, and the rest."""
    ids: list[Int32] = []
    log_probs: list[Float32] = []
    begin, lines = 0, iter(submitted.lines)
    for draw in submitted.step.others:
        count = draw.rules.top or 0
        if count > MOST_LIKELY:
            line = next(lines)
            top_ids = ranking(line)[:count].astype(np.int32)
            top_log_probs = log_softmax(line)[top_ids].astype(np.float32)
        else:
            both = found[begin : begin + 2 * count]
            top_ids, top_log_probs = both[:count], both[count:].view(np.float32)
            begin += 2 * count
        ids.append(top_ids)
        log_probs.append(top_log_probs)
    return np.concatenate(ids), np.concatenate(log_probs)


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> Int32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NONE
