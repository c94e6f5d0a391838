"""The end of a step on a GPU: from logits in its memory to drawn tokens on the host.

sequences ─draws─▶ rows of integers + lists ─one copy─▶ kernel draw_tokens ─one copy─▶ tokens, probabilities, ranks
                                                          └ histories of sequences with penalties stay on the device

What else the sequences hold, words and grammars, is on the host (plugins/sequences.py).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError, RequestError
from ingot.plan import Plan
from ingot.plugins.cuda.gpu import Argument, Arguments, Device, Kernel
from ingot.plugins.cuda.step_tables import within
from ingot.plugins.cuda.work import integer, pointer
from ingot.plugins.ops.sample import Draw, Drawn, log_softmax, ranking
from ingot.plugins.sequences import Sequences, drawing_slots
from ingot.step_io import LAST_DRAWN, Float32, Int32, SequenceRules, StepBatch, StepResult

KERNELS = {"sample.f32.sm80": "draw_tokens"}  # of a plan → as the machine code names it

_INT = 4
_THREADS = 512
_LINES = 32  # draws of one launch whose rules change logits: each needs a copy of its row
_MOST_LIKELY = 1024  # tokens that a draw lists on the device; longer lists are sorted on the host
_RESULT = 3  # integers of a draw's result: token, log probability, rank

_ROW = np.dtype(  # struct Draw of draw.cu
    [
        ("row", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("seed", np.uint64),
        ("counter", np.uint64),
        ("log_min_p", np.float64),
        *[(name, np.float32) for name in ("repetition", "frequency", "presence")],
        *[(name, np.int32) for name in ("biases", "num_biases", "mask", "mask_words")],
        *[(name, np.int32) for name in ("slot", "length", "num_prompt")],
        *[(name, np.int32) for name in ("known", "top", "num_top", "line")],
    ]
)
_WIDTH = _ROW.itemsize // _INT
_NONE: Int32 = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawLayout:
    """Integers of what draws need on the device.

    draws    of one round: what is sent and fetched at a time
    lists    of the biases and masks of a round: at least those of any draw
    tops     of the most likely tokens of a round: twice as many as tokens
    history  of a sequence
    lines    of scratch, each [vocab] floats and [vocab] counts
    """

    draws: int
    lists: int
    tops: int
    slots: int
    history: int
    lines: int
    vocab: int

    @classmethod
    def of(cls, plan: Plan) -> "DrawLayout":
        """Every step within the plan's limits needs few rounds."""
        limits, vocab = plan.limits, plan.vocab_size
        mask = _mask_words(vocab)
        return cls(
            draws=limits.max_logit_rows,
            lists=max(4 * vocab + mask, _LINES * mask),  # a bias and a ban for each token
            tops=2 * max(_MOST_LIKELY, 32 * limits.max_logit_rows),
            slots=limits.max_batch_size,
            history=limits.max_seq_len + 1,
            lines=min(_LINES, limits.max_batch_size),
            vocab=vocab,
        )

    @property
    def sent(self) -> int:
        return _WIDTH * self.draws + self.lists

    @property
    def results(self) -> int:
        return _RESULT * self.draws + self.tops

    @property
    def nbytes(self) -> int:
        """On the device."""
        return _INT * (self.sent + self.results + self.slots * (self.history + 1) + 2 * self.lines * self.vocab)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round:
    """Draws that are computed together. launches: how many each launch computes; tops: most likely tokens."""

    rows: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    lists: list[Int32] = dataclasses.field(default_factory=list)
    num_lists: int = 0
    tops: int = 0
    lines: int = 0
    launches: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The draws of a step under way.

    record   moves their sequences on
    logits  float32 [rows, vocab] where wanted; [0, vocab] elsewhere
    lines   those of draws whose most likely tokens the host sorts
    rounds  draws of each round, and the integers that come back of them: of the last round when `event` has come
    """

    draws: Sequence[Draw]
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

    def of_step(self, batch: StepBatch) -> list[Draw]:
        """The draws of a step. Raises RequestError where one cannot be."""
        draws, known, vocab = self._sequences.draws(batch), batch.known, self._layout.vocab
        if known is not None and not (within(known.token, vocab) and within(known.top, vocab + 1)):
            raise RequestError(
                "a token whose probability is asked for, or the number of most likely tokens, is out of range",
                expected=f"token ids below {vocab}, at most {vocab} most likely tokens",
            )
        longest = max((draw.num_prompt + draw.counter for draw in draws if draw.rules.penalises), default=0)
        if longest >= self._layout.history:
            raise RequestError("a sequence has more tokens than the engine is built for", got=str(longest))
        return draws

    def submit(self, batch: StepBatch, draws: Sequence[Draw], logits_at: int) -> Submitted:
        """Enqueue the draws of a step behind it. logits_at: float32 [wanted rows, vocab] on the device."""
        self._turn = 1 - self._turn
        logits = None
        if batch.want_logits:
            logits = np.empty((len(batch.logit_rows), self._layout.vocab), np.float32)
            self._device.fetch(logits, logits_at)
        long = [draw.row for draw in draws if (draw.rules.top or 0) > _MOST_LIKELY]
        lines = [np.empty(self._layout.vocab, np.float32) for _ in long]
        for row, line in zip(long, lines, strict=True):
            self._device.fetch(line, logits_at + line.nbytes * row)
        rounds: list[tuple[int, Int32]] = []
        slots = [*drawing_slots(batch), *[-1] * len(draws)]
        for each in self._rounds(draws, slots):
            if rounds:  # the memory of the round before it is used again
                self._device.wait()
                rounds[-1] = rounds[-1][0], rounds[-1][1].copy()
            rounds.append((len(each.rows), self._enqueue(each, logits_at)))
        event = self._events[self._turn]
        self._device.record(event)
        record = self._sequences.submit(batch)
        return Submitted(draws=draws, record=record, logits=logits, lines=lines, rounds=rounds, event=event)

    def finish(self, submitted: Submitted) -> StepResult:
        """Wait for a step, and move its sequences on."""
        self._device.wait_for(submitted.event)
        split = [(found[: _RESULT * count], found[_RESULT * count :]) for count, found in submitted.rounds]
        ids, log_probs, token_ranks = _joined([rows for rows, _ in split]).reshape(-1, _RESULT).T.copy()
        wants = any(draw.rules.top is not None for draw in submitted.draws)
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
        wrong = next((token for token in (*named, *tokens.tolist()) if not 0 <= token < vocab), None)
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

    def _rounds(self, draws: Sequence[Draw], slots: Sequence[int]) -> Iterator[_Round]:
        """As few as there is room for."""
        layout, current = self._layout, _Round()
        for draw, slot in zip(draws, slots, strict=False):
            mask, biases = _mask(draw, layout.vocab), _biases(draw)
            count = len(mask) + len(biases)
            num_top = -1 if draw.rules.top is None else draw.rules.top
            listed = num_top if num_top <= _MOST_LIKELY else 0  # else its rank alone
            full = len(current.rows) == layout.draws or current.num_lists + count > layout.lists
            if full or 2 * (current.tops + listed) > layout.tops:
                yield current
                current = _Round()
            penalised = slot >= 0 and draw.rules.penalises
            changes = draw.known < 0 and (draw.allowed is not None or bool(count) or penalised)
            if not current.launches or (changes and current.lines == layout.lines):
                current.launches.append(0)
                current.lines = 0
            current.launches[-1] += 1
            current.rows.append(self._row(draw, current, len(biases), len(mask), slot, listed, changes))
            current.lines += changes
            current.lists += [biases, mask]
            current.num_lists += count
            current.tops += max(listed, 0)
        if current.rows:
            yield current

    def _row(
        self, draw: Draw, before: _Round, biases: int, mask: int, slot: int, listed: int, changes: bool
    ) -> tuple[float, ...]:
        """In the order of _ROW; but `top` still counts tokens of the round, from 0."""
        rules, vocab = draw.rules, self._layout.vocab
        min_p = float(np.float32(rules.min_p))
        return (
            draw.row,
            rules.temperature,
            min(rules.top_k, vocab),
            rules.top_p,
            rules.seed,
            draw.counter,
            math.log(min_p) if min_p > 0 else -math.inf,
            rules.repetition_penalty,
            rules.frequency_penalty,
            rules.presence_penalty,
            before.num_lists,
            biases // 2,
            before.num_lists + biases,
            -1 if draw.allowed is None else mask,
            slot,
            draw.num_prompt + draw.counter if rules.penalises else 0,
            draw.num_prompt,
            draw.known,
            2 * before.tops,
            listed,
            before.lines if changes else -1,
        )

    def _enqueue(self, each: _Round, logits_at: int) -> Int32:
        """What will hold the results of a round: those of each draw, then the most likely tokens."""
        count, to_send = len(each.rows), self._to_send[self._turn]
        rows = np.array(each.rows, _ROW)
        rows["top"] += _RESULT * count
        end = _WIDTH * count
        to_send[:end] = rows.view(np.int32)
        for part in each.lists:
            to_send[end : end + len(part)] = part
            end += len(part)
        self._device.send(self._sent_at, to_send[:end])
        first = 0
        for number in each.launches:
            self._launch(first, number, self._sent_at + _INT * _WIDTH * count, logits_at)
            first += number
        found = self._fetched[self._turn][: _RESULT * count + 2 * each.tops]
        self._device.fetch(found, self._results_at)
        return found

    def _launch(self, first: int, number: int, lists_at: int, logits_at: int) -> None:
        before = self._results_at, logits_at, self._sent_at, lists_at, self._drawn_at, self._histories_at
        values: list[Argument] = [
            *[pointer(address) for address in before],
            integer(self._layout.history),
            *[pointer(address) for address in (self.lines_at, self._counts_at)],
            *[integer(value) for value in (first, self._layout.vocab)],
        ]
        self._device.launch(self._kernel, (number, 1, 1), _THREADS, 0, Arguments(values))


def _tops(submitted: Submitted, found: Int32) -> tuple[Int32, Float32]:
    """The most likely tokens of each draw, and their log probabilities: those found on the device, and the rest."""
    ids: list[Int32] = []
    log_probs: list[Float32] = []
    begin, lines = 0, iter(submitted.lines)
    for draw in submitted.draws:
        count = draw.rules.top or 0
        if count > _MOST_LIKELY:
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


def _mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def _mask(draw: Draw, vocab: int) -> Int32:
    return _NONE if draw.allowed is None else draw.allowed[: _mask_words(vocab)].view(np.int32)


def _biases(draw: Draw) -> Int32:
    """Ids, ascending, then the biases of these as float32: at most one behind a ban, which none changes."""
    if not draw.bias_ids:
        return _NONE
    ids, values = np.array(draw.bias_ids, np.int32), np.array(draw.bias, np.float32)
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values[order]
    changes = np.ones(len(ids), np.bool_)
    changes[1:] = (ids[1:] != ids[:-1]) | np.isfinite(values[:-1])
    return np.concatenate([ids[changes], values[changes].view(np.int32)])


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> Int32:
    return np.concatenate(parts) if parts else _NONE
