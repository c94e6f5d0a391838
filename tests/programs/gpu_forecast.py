"""How long the steps of a GPU engine should take, before anybody has run them; published figures by the same model.

python -m tests.programs.gpu_forecast ENGINE [--device h200] [--batches 1,8,64] [--context 1024] [--prompts 2048]
python -m tests.programs.gpu_forecast --published

An op takes the larger of bytes / (BYTES x bandwidth) and operations / (OPERATIONS x rate), and LAUNCH for each of its
launches; a step takes the sum of its ops. Bandwidth and rate are those of the device's data sheet, dense. The engine is
only read, so this needs no GPU.
"""

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ingot.engine import read_plan
from ingot.plan import Plan
from ingot.plugins.cuda.bind import bind, group_of
from ingot.plugins.cuda.shapes import attention_tiles, split_count
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Addresses, Multiply
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load

BYTES, OPERATIONS = 0.8, 0.6  # what good kernels reach of a data sheet; what the published figures below agree with
LAUNCH = 3e-6  # seconds within a graph: an assumption until a GPU has run one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """bandwidth: bytes per second; rate, rate_fp8: operations per second, dense. source: of all of them."""

    memory: float
    bandwidth: float
    rate: float
    rate_fp8: float
    multiprocessors: int
    source: str

    def seconds(self, nbytes: float, operations: float, launches: int = 0, *, fp8: bool = False) -> float:
        """Of one op."""
        rate = self.rate_fp8 if fp8 else self.rate
        return max(nbytes / (BYTES * self.bandwidth), operations / (OPERATIONS * rate)) + LAUNCH * launches


_HOPPER = {"rate": 989e12, "rate_fp8": 1979e12, "multiprocessors": 132}
DEVICES = {
    "h100": Device(memory=80e9, bandwidth=3.35e12, source="NVIDIA H100 SXM data sheet", **_HOPPER),  # type: ignore[arg-type]
    "h200": Device(memory=141e9, bandwidth=4.8e12, source="NVIDIA H200 SXM data sheet", **_HOPPER),  # type: ignore[arg-type]
}

# Llama-3.1-8B in FP8 on one GPU, tokens per second of output: perf-overview.md in the docs of TensorRT-LLM 1.0
PUBLISHED = {  # (input, output) → h200, h100
    (128, 2048): (26221, 22714),
    (128, 4096): (18027, 14325),
    (500, 2000): (20770, 17660),
    (1000, 1000): (17744, 15220),
    (1000, 2000): (16828, 13899),
    (2048, 128): (3538, 3450),
    (2048, 2048): (12194, 9305),
    (5000, 500): (3902, 3459),
    (20000, 2000): (1804, 1351),
}
_WEIGHTS, _EMBEDDING, _KV_BYTES, _LAYERS, _HEADS_DIM = 7.5e9, 1.05e9, 65536, 32, 4096
_MOST_TOGETHER, _OF_MEMORY = 2048, 0.9  # requests; the share of memory that is used


def published_forecast(device: Device, given: int, new: int) -> float:
    """Tokens per second where as many requests run as fit: a step decodes all of them and computes its share of
    prompts. Weights and KV cache in FP8, lm_head in 16 bits."""
    room = (_OF_MEMORY * device.memory - _WEIGHTS - _EMBEDDING) / _KV_BYTES
    batch, seen = min(_MOST_TOGETHER, room / (given + new / 2)), given + new / 2
    rows = batch * (1 + given / new)
    products = device.seconds(_WEIGHTS, 2 * _WEIGHTS * rows, fp8=True)
    decode = device.seconds(batch * seen * _KV_BYTES, 4 * _LAYERS * _HEADS_DIM * batch * seen)
    prefill = device.seconds(0, 2 * _LAYERS * _HEADS_DIM * batch * given**2 / new)
    return batch / (products + decode + prefill)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Ops of one kind in a step, together."""

    kind: str
    nbytes: int
    operations: int
    launches: int
    seconds: float


def step_forecast(plan: Plan, device: Device, sequences: Sequence[tuple[int, int]]) -> Iterator[Line]:
    """A line for each kind of op. sequences: (tokens before, tokens now)."""
    load, work = Load(sequences=sequences, logit_rows=len(sequences)), PlanWork(plan)
    counts, splits = _counts(plan, device, load)
    found: dict[str, list[Line]] = {}
    for bound in bind(plan, _nowhere(plan)):
        launches = sum(
            isinstance(each, Multiply) or (min(each.grid(counts, splits)) > 0 and not (each.only_split and splits == 1))
            for each in bound.work
        )
        does = work.of(bound.step, load)
        line = Line(
            kind=bound.step.op,
            nbytes=does.nbytes,
            operations=does.operations,
            launches=launches,
            seconds=device.seconds(does.nbytes, does.operations, launches),
        )
        found.setdefault(bound.step.op, []).append(line)
    for kind, lines in found.items():
        sums = {key: sum(getattr(each, key) for each in lines) for key in ("nbytes", "operations", "launches")}
        yield Line(kind=kind, seconds=sum(each.seconds for each in lines), **sums)


def _counts(plan: Plan, device: Device, load: Load) -> tuple[Counts, int]:
    decode = all(new == 1 for _, new in load.sequences) and attention_tiles(group_of(plan)).decode > 0
    items = len(load.sequences) if decode else 0
    prefill = 0 if decode else sum(-(-new // attention_tiles(group_of(plan)).prefill) for _, new in load.sequences)
    longest = plan.limits.max_seq_len  # graphs are captured for it
    counts = Counts(
        tokens=load.tokens,
        logit_rows=load.logit_rows,
        sequences=len(load.sequences),
        decode=items,
        prefill=prefill,
        longest=longest,
    )
    return counts, split_count(items, plan.caches[0].kv_heads, longest, device.multiprocessors)


def _nowhere(plan: Plan) -> Addresses:
    """Addresses that nobody reads."""
    zeros = dict.fromkeys(("weights", "arena", "sums", "inputs", "drawn", "partial", "stats", "table_width"), 0)
    groups = len(plan.caches)
    return Addresses(kv=(0,) * groups, num_blocks=(1,) * groups, tables=defaultdict(int), **zeros)


def engine_tables(
    plan: Plan, device: Device, batches: Sequence[int], context: int, prompts: Sequence[int]
) -> list[str]:
    """A table for each step."""
    steps = [(f"decode of {size} after {context:,} tokens", [(context, 1)] * size) for size in batches]
    steps += [(f"prefill of {length:,} tokens", [(0, length)]) for length in prompts]
    text = []
    for name, sequences in steps:
        lines = list(step_forecast(plan, device, sequences))
        seconds = sum(each.seconds for each in lines)
        tokens = sum(new for _, new in sequences) / seconds
        text += [f"{name}: {1e3 * seconds:.3f} ms, {tokens:,.0f} tokens/s, draws and host not counted"]
        text += ["| op | launches | MB | GFLOP | ms |", "|---|---|---|---|---|"]
        text += [
            f"| {each.kind} | {each.launches} | {each.nbytes / 1e6:,.1f} | {each.operations / 1e9:,.2f} "
            f"| {1e3 * each.seconds:.3f} |"
            for each in lines
        ]
    return text


def published_table() -> list[str]:
    """The forecast beside what was published."""
    text = ["| input | output | GPU | published | forecast | ratio |", "|---|---|---|---|---|---|"]
    for (given, new), figures in PUBLISHED.items():
        for device, figure in zip(("h200", "h100"), figures, strict=True):
            found = published_forecast(DEVICES[device], given, new)
            text.append(f"| {given:,} | {new:,} | {device} | {figure:,} | {found:,.0f} | {found / figure:.2f} |")
    return text


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--batches", default="1,8,64", type=_numbers)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", default="2048", type=_numbers)
    parser.add_argument("--published", action="store_true")
    given = parser.parse_args()
    if given.published == (given.engine is not None):
        parser.error("expected an engine, or --published")
    if given.published:
        print("\n".join(published_table()))
        return
    device = DEVICES[given.device]
    print(f"{given.device} ({device.source}): a forecast, not executed on a GPU")
    print("\n".join(engine_tables(read_plan(given.engine), device, given.batches, given.context, given.prompts)))


if __name__ == "__main__":
    main()
