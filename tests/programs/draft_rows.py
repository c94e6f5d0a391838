"""What drafts cost and bring: the time of a step that verifies them, and tokens per second by how often they are right.

python -m tests.programs.draft_rows --engine_dir ENGINE [--contexts 100,2000] [--drafts 0,1,3,7] [--rounds 5]

Steps of one sequence behind a random context, each with some drafts, in turn. The columns `a = ...` are the tokens per
second of decoding with so many drafts in each step, over those without drafts, where each draft is right with
probability a if those before it are.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.sequences import Sequences
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.runtime.step_batch import assemble

SHARES = (0.3, 0.5, 0.7, 0.9)
_STEPS = 5  # of each kind in a round


class Verifier:
    """A sequence of one engine that decodes behind a context, again and again at the same place."""

    def __init__(self, loaded: LoadedEngine, context: int, most: int) -> None:
        plan, rng = loaded.engine.plan, np.random.default_rng(0)
        self._session = loaded.session
        self._blocks = BlockManager(loaded.session.num_blocks, plan.tokens_per_block)
        self._sequences = Sequences(loaded.session, 1)
        tokens = rng.integers(3, plan.vocab_size, context + most + 1).astype(np.int32)
        self._request = Request(tokens[:context], max_new_tokens=most + 2)
        self._following = tokens[context:]
        if not self._blocks.reserve([(self._request.blocks, context + most + 1)]):
            raise SystemExit(f"the KV cache is too small for {context + most + 1} tokens")
        while self._request.num_computed < context:
            self._sequences.start([self._request])
            count = min(context - self._request.num_computed, loaded.limits.max_num_tokens)
            self._session.run(assemble({self._request: count}).batch)
            self._request.num_computed += count
        self._request.append(int(self._following[0]), 0.0)

    def seconds(self, drafts: int) -> float:
        """Of a step with so many drafts."""
        request = self._request
        self._sequences.end([request])
        self._sequences.start([request])
        request.draft(self._following[1 : 1 + drafts])
        batch = assemble({request: 1 + drafts}).batch
        begin = time.perf_counter()
        self._session.run(batch)
        return time.perf_counter() - begin

    def release(self) -> None:
        """Give the blocks back."""
        self._sequences.end([self._request])
        self._blocks.release(self._request.blocks)


def tokens_per_step(share: float, drafts: int) -> float:
    """Expected, where each draft is right with this probability if those before it are."""
    return sum(share**place for place in range(drafts + 1))


def measure(engine: Path, contexts: Sequence[int], drafts: Sequence[int], rounds: int, threads: int | None) -> str:
    """The table."""
    loaded = load_engine(engine, RuntimeConfig(threads=threads))
    lines = [
        f"| context | drafts | ms | over none | {' | '.join(f'a = {share}' for share in SHARES)} |",
        "|---" * (4 + len(SHARES)) + "|",
    ]
    for context in contexts:
        verifier = Verifier(loaded, context, max(drafts))
        times: dict[int, list[float]] = {count: [] for count in drafts}
        for _ in range(rounds):
            for count in drafts:
                times[count] += [verifier.seconds(count) for _ in range(_STEPS)]
        verifier.release()
        medians = {count: statistics.median(own) for count, own in times.items()}
        for count, seconds in medians.items():
            cost = seconds / medians[drafts[0]]
            gains = [tokens_per_step(share, count) / tokens_per_step(share, drafts[0]) / cost for share in SHARES]
            numbers = " | ".join(f"{gain:.2f}" for gain in gains)
            lines.append(f"| {context} | {count} | {1e3 * seconds:.2f} | {cost:.2f} | {numbers} |")
    loaded.session.close()
    loaded.engine.close()
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--contexts", type=_numbers, default=[100, 2000])
    parser.add_argument("--drafts", type=_numbers, default=[0, 1, 2, 3, 5, 7], help="the first is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(measure(options.engine_dir, options.contexts, options.drafts, options.rounds, options.threads))


if __name__ == "__main__":
    main()
