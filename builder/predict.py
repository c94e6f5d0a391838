"""How fast an engine will be on this machine, from its own kernels and packed weights, before anyone runs it whole.

    plan    embed  layer 0  layer 1  layer 2 ......... layer n  head
    sample  └────────── run and timed ─┘                        └──┘    enough weights that they come from memory

Steps of the other layers count as much as those of the sample that do the same. Prompts and decode steps are those of
`timed_run`: attention, norms, threads and draws are in them; scheduling and text, which the runtime adds, are not.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.schedule import schedule
from ingot.configs.sizes import format_bytes
from ingot.engine import map_file
from ingot.errors import IngotError
from ingot.fixed_tables import blocks_needed
from ingot.plan import Plan, Rows, Step, Weight
from ingot.plugins.registry import find_op
from ingot.plugins.target import NumaAware, SessionOptions, Target, Tunable
from ingot.step_io import Int32, TimedSession
from ingot.timed_run import TimedRun, TimedStep
from ingot.weights_memory import huge_pages

PROMPT = 512  # tokens
CONTEXT = 128  # tokens before a decode step
SAMPLE_BYTES = 64 << 20  # of weights, or twice the last cache where that is more
SMALL = 8 << 20  # bytes of weights: below, the runtime around the kernels takes as long as they do
BESIDE = 48 << 20  # bytes: scratch of kernels, and what packing left behind
ROUNDS, ROUNDS_SECONDS = 5, 3.0  # of a prompt and decode steps, at most; no more once they took so long
STEPS, STEPS_SECONDS = 12, 0.2  # that decode, in a round; likewise

Average = Callable[[npt.NDArray[np.float64], int], npt.NDArray[np.float64]]
"""Over the first axis, e.g. np.mean."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Tokens per second of one sequence: decoding after `context` tokens, and in a prompt of `prompt` tokens."""

    context: int
    decode: float
    prompt: int
    prefill: float

    def __str__(self) -> str:
        return (
            f"predicted for this machine: {self.decode:,.1f} tokens/s for one sequence after {self.context} tokens, "
            f"{self.prefill:,.1f} tokens/s in a prompt of {self.prompt}"
        )


class Sample:
    """The part of a plan that is run, as the target calls its steps. memory: bytes that it takes, weights included."""

    def __init__(self, plan: Plan, least_bytes: int, target: Target) -> None:
        rows = {buffer.name: buffer.rows for buffer in plan.buffers}
        ends = (
            i for i, step in enumerate(plan.steps) if any(rows[name] is Rows.LOGITS for name in step.outputs if name)
        )
        end = next(ends, len(plan.steps))  # what follows runs for the rows whose logits are wanted
        self._body, tail = plan.steps[:end], plan.steps[end:]
        self._keys = [_key(plan, step) for step in self._body]
        missing, size = set(self._keys), _weight_bytes(plan, tail)
        self._cut = 0
        while self._cut < end and (missing or size < least_bytes):
            missing.discard(self._keys[self._cut])
            self._cut += 1
            size = _weight_bytes(plan, (*self._body[: self._cut], *tail))
        steps = (*self._body[: self._cut], *tail)
        names = {step.name for step in steps}
        tactics = {name: tactic for name, tactic in plan.tactics.items() if name in names}
        self.plan = schedule(dataclasses.replace(plan, steps=steps, tactics=tactics, variants=()), target)
        self.prompt = min(PROMPT, plan.limits.max_input_len, plan.limits.max_num_tokens, self._longest)
        blocks = blocks_needed(plan, sequences=1, length=self.length)
        kept = sum(count * group.block_bytes for count, group in zip(blocks, plan.caches, strict=True))
        activations = plan.arena_bytes * self.prompt // plan.limits.max_num_tokens
        weights = sum(weight.nbytes for weight in self._weights())
        self.memory = weights + activations + kept + BESIDE

    @property
    def _longest(self) -> int:
        """Tokens that a sequence may have in the KV cache, but for the steps that decode."""
        return max(1, min(self.plan.limits.max_seq_len - 1, self.plan.max_positions) - 1)

    @property
    def context(self) -> int:
        """Tokens before a decode step."""
        return min(CONTEXT, self.prompt)

    @property
    def length(self) -> int:
        """Most tokens of the sequence."""
        return max(self.prompt, self.context + 1)

    def _weights(self) -> list[Weight]:
        """Those of its steps, tables included."""
        names = {name for step in self.plan.steps for name in step.inputs}
        return [weight for weight in self.plan.weights if weight.name in names]

    def copied(self, path: Path) -> npt.NDArray[np.uint8]:
        """Its weights in 2 MiB pages, at the places that they have in the section of all weights, which ends the file.

        They are read, since what is mapped as well would count as memory twice.
        """
        memory = huge_pages(self.plan.weight_bytes)
        with path.open("rb") as file:
            section = file.seek(0, os.SEEK_END) - self.plan.weight_bytes
            for weight in self._weights():
                each = weight.nbytes // weight.pieces[-1].end  # panel or row
                for piece in weight.pieces:
                    file.seek(section + piece.offset)
                    file.readinto(memory[piece.offset : piece.offset + (piece.end - piece.begin) * each].data)
        return memory

    def whole(self, steps: Sequence[TimedStep], average: Average) -> float:
        """Seconds that the whole plan would take, from repetitions of one step of the sample."""
        parts = average(np.array([step.times.parts for step in steps]), 0)
        outside = average(np.array([step.seconds - step.times.parts.sum() for step in steps]), 0)
        same: dict[Hashable, list[float]] = {}
        for key, seconds in zip(self._keys[: self._cut], parts, strict=False):
            same.setdefault(key, []).append(float(seconds))
        body = sum(float(np.mean(same[key])) for key in self._keys)
        return body + float(parts[self._cut :].sum() + outside)


def choose_sample(plan: Plan, target: Target, room: int | None) -> Sample | str:
    """What to run for a prediction, or why there will be none. room: bytes of memory that it may take."""
    if not isinstance(target, Tunable):
        return f"no speed is predicted for {target.name}"
    if (reason := target.run_blocker()) is not None:
        return f"no speed is predicted: {reason}"
    if plan.weight_bytes < SMALL:
        return "no speed is predicted: the model is too small, most of its time passes outside kernels"
    sample = Sample(plan, max(SAMPLE_BYTES, 2 * last_cache_bytes()), target)
    if room is not None and sample.memory > room:
        return f"no speed is predicted: that takes {format_bytes(sample.memory)} of memory, more than --max_mem leaves"
    return sample


def predict(sample: Sample, path: Path, target: Target) -> Prediction | str:
    """What the engine whose rank file was written to `path` will do here, or why that is not known."""
    blocks = blocks_needed(sample.plan, sequences=1, length=sample.length)
    try:
        if isinstance(target, NumaAware) and target.placement(sample.plan, None) is not None:
            weights = sample.copied(path)
        else:
            file = map_file(path)
            weights = np.frombuffer(file, np.uint8, sample.plan.weight_bytes, len(file) - sample.plan.weight_bytes)
        session = target.open_session(sample.plan, weights, SessionOptions(num_blocks=blocks))
    except IngotError as error:
        return f"no speed is predicted: {error.what}"
    try:
        if not isinstance(session, TimedSession):
            return f"no speed is predicted: sessions of {target.name} do not say where their time goes"
        return _measure(sample, TimedRun(session, sample.plan, sequences=1, length=sample.length))
    finally:
        session.close()


def _measure(sample: Sample, run: TimedRun) -> Prediction:
    draw, highest = np.random.default_rng(0), min(PROMPT, sample.plan.vocab_size)

    def ids(count: int) -> Int32:  # some rows of the token table, so that not all of it is read
        return draw.integers(0, highest, count).astype(np.int32)

    def prompt() -> TimedStep:
        return run.prefill(ids(sample.prompt))[0]

    def decode() -> TimedStep:
        return run.decode(ids(1), sample.context)

    prompt()  # once for nothing
    decode()
    prompts: list[TimedStep] = []
    decodes: list[list[TimedStep]] = []
    while len(prompts) < 2 or (len(prompts) < ROUNDS and _seconds(prompts, *decodes) < ROUNDS_SECONDS):
        prompts.append(prompt())
        steps = [decode(), decode()]
        while len(steps) < STEPS and _seconds(steps) < STEPS_SECONDS:
            steps.append(decode())
        decodes.append(steps)
    # TTFT is told as a median of requests; TPOT is the mean of a request's tokens, whatever held some of them up, and
    # the median over rounds, so that what else the machine does for a moment is not taken for its speed
    prefill = sample.whole(prompts, np.median)
    step = float(np.median([sample.whole(steps, np.mean) for steps in decodes]))
    return Prediction(context=sample.context, decode=1 / step, prompt=sample.prompt, prefill=sample.prompt / prefill)


def _seconds(*steps: Sequence[TimedStep]) -> float:
    return sum(each.seconds for some in steps for each in some)


def last_cache_bytes() -> int:
    """Bytes of the first processor's largest cache; 0 where the system does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def _key(plan: Plan, step: Step) -> Hashable:
    """Equal for steps that do the same work on other numbers."""
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    weights = {weight.name: (weight.dtype, weight.shape, weight.layout) for weight in plan.weights}
    touched = tuple(weights.get(name, cols.get(name)) for name in (*step.inputs, *step.outputs))
    attrs = tuple(sorted((name, value) for name, value in step.attrs.items() if name != "layer"))
    return step.op, step.kernel, touched, attrs, plan.tactics.get(step.name)


def _weight_bytes(plan: Plan, steps: Sequence[Step]) -> int:
    names = {name for step in steps if not find_op(step.op).tables for name in step.inputs}
    return sum(weight.nbytes for weight in plan.weights if weight.name in names)
