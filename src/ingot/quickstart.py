"""The whole path on the small model that ships with ingot: convert, build for this machine, generate, report."""

import dataclasses
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ingot
from ingot.bench.bytes_read import decode_bytes, machine_bandwidth, weight_bytes_per_step
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.generation import read_generation_defaults
from ingot.configs.sampling import SamplingParams
from ingot.convert.convert import convert
from ingot.doctor import choice_of_isa
from ingot.runtime.generate_text import stream_text
from ingot.runtime.memory import peak_memory
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_stream import TextRequest
from ingot.runtime.tokenizer import Tokenizer

SHIPPED = Path(ingot.__file__).parent / "shipped"
PROMPT = "The prince looked at"
MAX_TOKENS = 100
SEED = 7  # the same text on every machine of one ISA
SCHEMA_PROMPT = "The prince said: "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "rank": {"enum": ["prince", "count", "general", "soldier"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "married": {"type": "boolean"},
    },
    "required": ["name", "rank", "age", "married"],
    "additionalProperties": False,
}

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartReport:
    """One screen. peak_memory_bytes: the most this process had resident when the build was done, Python included.
    tpot_ms: of the tokens after those that came first, None where all came at once. bandwidth_fraction: bytes a decode
    step must read, over TPOT, of what this machine reads from as large a buffer. schema_answer: JSON that keeps to
    SCHEMA, None where llguidance is not installed."""

    model: str
    target: str
    target_why: str
    precision: str
    engine_dir: str
    engine_bytes: int
    build_seconds: float
    peak_memory_bytes: int
    load_ms: float
    prompt_tokens: int
    tokens: int
    ttft_ms: float
    tpot_ms: float | None
    machine_gbs: float
    bandwidth_fraction: float | None
    schema_answer: str | None


def quickstart(work: Path, target: str, progress: Progress, write: Callable[[str], None]) -> QuickstartReport:
    """Everything below `work`: work/checkpoint and work/engine. `write` gets the prompt, then the text as it comes."""
    converted = convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "checkpoint"), progress)
    built = build(BuildConfig(target=target), work / "checkpoint", work / "engine", progress)
    peak = peak_memory()

    begin = time.perf_counter()
    with ModelRunner.from_dir(work / "engine") as runner:
        load = time.perf_counter() - begin
        tokenizer = Tokenizer.from_dir(work / "engine")
        times = _generate(runner, tokenizer, write)
        schema_answer = _answer_by_schema(runner, tokenizer, write) if find_spec("llguidance") else None
    prompt_tokens = len(tokenizer.encode(PROMPT))
    # not over all but one, as TPOT mostly is: a reader who comes late finds several, and the machine would look faster
    late = len(times) - times.count(times[0])
    tpot = (times[-1] - times[0]) / late if late else None
    buffer_bytes = weight_bytes_per_step(built.plan)
    machine = machine_bandwidth(built.target, buffer_bytes)
    moved = decode_bytes(built.plan, batch_size=1, context=prompt_tokens + len(times) / 2)
    model = converted.model
    return QuickstartReport(
        model=f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {model.vocab_size} tokens",
        target=built.target,
        target_why=choice_of_isa(built.target),
        precision=built.precision,
        engine_dir=str(work / "engine"),
        engine_bytes=built.engine_bytes,
        build_seconds=built.seconds,
        peak_memory_bytes=peak,
        load_ms=1e3 * load,
        prompt_tokens=prompt_tokens,
        tokens=len(times),
        ttft_ms=1e3 * times[0],
        tpot_ms=1e3 * tpot if tpot else None,
        machine_gbs=machine / 1e9,
        bandwidth_fraction=moved / tpot / machine if tpot else None,
        schema_answer=schema_answer,
    )


def _generate(runner: ModelRunner, tokenizer: Tokenizer, write: Callable[[str], None]) -> list[float]:
    """Stream one completion to `write`; seconds from the request to each token."""
    temperature, top_k, top_p = read_generation_defaults(SHIPPED).resolve(None, None, None)
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=temperature, top_k=top_k, top_p=top_p, seed=SEED, ignore_eos=True
    )
    write(PROMPT)
    times: list[float] = []
    begin = time.perf_counter()
    for event in stream_text(runner, tokenizer, [TextRequest(prompt=PROMPT, params=params)]):
        if event.error is not None:
            raise event.error
        times += [time.perf_counter() - begin] * len(event.token_ids)
        write(event.text)
    write("\n")
    return times


def _answer_by_schema(runner: ModelRunner, tokenizer: Tokenizer, write: Callable[[str], None]) -> str:
    """JSON that is valid by construction, also to `write`."""
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=SEED, structured_outputs=form)
    events = list(stream_text(runner, tokenizer, [TextRequest(prompt=SCHEMA_PROMPT, params=params)]))
    for event in events:
        if event.error is not None:
            raise event.error
    text = "".join(event.text for event in events)
    names = ", ".join(SCHEMA["properties"])
    write(f"\n{SCHEMA_PROMPT}(by a JSON schema of {names})\n{json.dumps(json.loads(text), ensure_ascii=False)}\n")
    return text
