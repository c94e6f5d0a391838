"""Speed of speculative decoding on given texts, as if the model had written them.

python -m tests.programs.replayed_drafts --engine_dir ENGINE --tokenizer_dir DIR --input_file FILE [--requests 8]
    [--batch_size 1] [--rounds 3] [--max_tokens 400]

FILE: JSON lines {"prompt": ..., "completion": ...}. Every step of the engine runs, and takes its time; only its draws
are replaced by the tokens of the completions. So an engine with random weights will do, if its vocabulary has the
tokens of the tokenizer. Rounds with and without drafts take turns.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.configs.speculation import Speculation
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.reports import Work
from ingot.runtime.request import Request
from ingot.runtime.session import load_engine
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import NO_LOG_PROB, NOT_DRAWN, Ahead, Ending, Int32, SequenceRules, Session, StepBatch, StepResult
from tests.runtime.wrapped_session import WrappedSession


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids."""

    prompt: list[int]
    completion: list[int]


class ReplayingSession(WrappedSession):
    """Draws what the texts say, which have different prompts."""

    def __init__(self, inner: Session, texts: Sequence[Text]) -> None:
        super().__init__(inner)
        self._completions = {tuple(text.prompt): text.completion for text in texts}
        self._held: dict[int, tuple[SequenceRules, list[int], int]] = {}

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        super().start(slot, rules, tokens, num_prompt)
        self._held[slot] = rules, tokens.tolist(), num_prompt

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        result = super().run(batch)
        tokens_of_rows = batch.logit_rows[batch.draws]
        sequences = np.searchsorted(batch.query_starts, tokens_of_rows, side="right") - 1
        ids, ends, counts, before = list[int](), list[Ending](), True, -1
        for token, sequence in zip(tokens_of_rows.tolist(), sequences.tolist(), strict=True):
            slot = int(batch.slots[sequence])
            counts = slot != before or (counts and int(batch.ids[token]) == ids[-1] and ends[-1] == Ending.NONE)
            before = slot
            ids.append(self._next(slot) if counts else NOT_DRAWN)
            ends.append(self._ending(slot) if counts else Ending.NONE)
        for slot in set(batch.slots[sequences].tolist()):
            if self._ending(slot) is Ending.NONE:
                rules, tokens, num_prompt = self._held[slot]
                super().start(slot, rules, np.array(tokens, np.int32), num_prompt)
        return dataclasses.replace(
            result,
            ids=np.array([ids], np.int32),
            log_probs=np.full((1, len(ids)), NO_LOG_PROB, np.float32),
            ends=np.array(ends, np.int32),
        )

    def _next(self, slot: int) -> int:
        _, tokens, num_prompt = self._held[slot]
        tokens.append(self._completion(slot)[len(tokens) - num_prompt])
        return tokens[-1]

    def _ending(self, slot: int) -> Ending:
        _, tokens, num_prompt = self._held[slot]
        return Ending.LENGTH if len(tokens) - num_prompt == len(self._completion(slot)) else Ending.NONE

    def _completion(self, slot: int) -> list[int]:
        _, tokens, num_prompt = self._held[slot]
        return self._completions[tuple(tokens[:num_prompt])]


def read_texts(path: Path, tokenizer: Tokenizer, requests: int, max_tokens: int, vocab_size: int) -> list[Text]:
    """Those that have two tokens or more, and another prompt than those before."""
    found: dict[tuple[int, ...], Text] = {}
    for line in path.read_text().splitlines():
        document = json.loads(line)
        prompt = list(tokenizer.encode(document["prompt"]))
        whole = list(tokenizer.encode(document["prompt"] + document["completion"]))
        completion = whole[len(prompt) :][:max_tokens]
        assert max(whole) < vocab_size, "the engine lacks tokens of this tokenizer"
        if len(completion) > 1:
            found.setdefault(tuple(prompt), Text(prompt, completion))
    return list(found.values())[:requests]


def replay(runner: ModelRunner, texts: Sequence[Text], batch_size: int) -> tuple[float, Work]:
    """Seconds of decoding that many texts at a time; what was done."""
    before, seconds = runner.executor.work(), 0.0
    for place in range(0, len(texts), batch_size):
        group = texts[place : place + batch_size]
        requests = [
            Request(np.array(text.prompt, np.int32), max_new_tokens=len(text.completion), want_log_probs=False)
            for text in group
        ]
        begin = time.perf_counter()
        runner.executor.complete(requests)
        seconds += time.perf_counter() - begin
        for request, text in zip(requests, group, strict=True):
            assert request.generated().tolist() == text.completion, "the texts are said as they are"
    after = runner.executor.work()
    return seconds, dataclasses.replace(
        after,
        steps=after.steps - before.steps,
        drafted=after.drafted - before.drafted,
        right_drafts=after.right_drafts - before.right_drafts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--tokenizer_dir", type=Path, required=True)
    parser.add_argument("--input_file", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_tokens", type=int, default=400)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    runners: list[ModelRunner] = []
    for speculation in (None, Speculation()):
        config = RuntimeConfig(
            threads=options.threads, speculation=speculation, enable_prefix_cache=False, kv_cache_memory=1 << 30
        )
        loaded = load_engine(options.engine_dir, config)
        if not runners:
            vocab_size, tokenizer = loaded.engine.plan.vocab_size, Tokenizer.from_dir(options.tokenizer_dir)
            texts = read_texts(options.input_file, tokenizer, options.requests, options.max_tokens, vocab_size)
        session = ReplayingSession(loaded.session, texts)
        runners.append(ModelRunner(dataclasses.replace(loaded, session=session), config))
    seconds: list[list[float]] = [[], []]
    for _ in range(options.rounds):
        for place, runner in enumerate(runners):
            taken, work = replay(runner, texts, options.batch_size)
            seconds[place].append(taken)
    count, (plain, drafted) = sum(len(text.completion) for text in texts), (statistics.median(own) for own in seconds)
    ratios = sorted(ours / theirs for ours, theirs in zip(*seconds, strict=True))
    print("| texts | tokens | tokens/s | with drafts | times as fast | tokens a step | drafts, of them right |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {options.input_file.stem}: {len(texts)}, {options.batch_size} at a time | {count} | {count / plain:.1f} "
        f"| {count / drafted:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
        f"| {count / work.steps / min(options.batch_size, len(texts)):.2f} | {work.drafted}, {work.right_drafts} |"
    )
    for runner in runners:
        runner.close()


if __name__ == "__main__":
    main()
