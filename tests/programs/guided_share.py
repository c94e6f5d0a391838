"""What share of a decode step grammars take, where every row has one.

python -m tests.programs.guided_share ENGINE TOKENIZER_DIR [--rows 32] [--rounds 5]

Rows follow instances of our own schemas (`grammar_costs`): their tokens have by far the highest logits. The same draws
are made with and without grammars, in turn; the difference holds masks, consuming, and drawing from a masked row. The
step is one of as many rows in the engine, whose weights may be random; its draws are free.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import runtime_config
from ingot.runtime.guided.grammars import schema_text
from ingot.runtime.guided.guides import Guides
from ingot.runtime.session import load_engine
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import Int32, SequenceRules, Session, TimedSession
from ingot.timed_run import TimedRun
from tests.programs.grammar_costs import schemas

HIGHEST = 50.0
Path_ = tuple[str, list[int]]
"""A schema, and the tokens of an instance as far as its grammar takes them."""


def paths(guides: Guides, tokenizer: Tokenizer) -> Iterator[Path_]:
    """Of every schema whose instance can begin so."""
    for schema, instance in schemas():
        text = schema_text(schema)
        matcher, tokens = guides.compile("json_schema", text), list[int]()
        ids = tokenizer.encode("\n" + json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
        while not tokenizer.decode([ids.pop(0)], skip_special_tokens=False).endswith("\n"):
            pass  # not "▁{": as behind other text
        for token in ids:
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                break
            tokens.append(token)
            if matcher.consume(token):
                break
        if tokens:
            yield text, tokens


class Rows:
    """As many sequences as there are rows, each on its way along an instance; behind its end it begins the next."""

    def __init__(self, session: Session, guides: Guides | None, ways: Sequence[Path_], rows: int) -> None:
        self._session, self._guides, self._ways = session, guides, ways
        self._which, self._rest = list(range(rows)), [list[int]() for _ in range(rows)]
        self._held: list[object] = [None] * rows

    def begin(self) -> None:
        """With new sequences, the slots having held others."""
        self._rest = [[] for _ in self._rest]

    def next_tokens(self) -> list[int]:
        """Where a sequence has ended, another begins: this is no part of a step."""
        for row, rest in enumerate(self._rest):
            if not rest:
                text, tokens = self._ways[self._which[row] % len(self._ways)]
                grammar = None if self._guides is None else self._guides.compile("json_schema", text)
                rules = SequenceRules(temperature=1.0, seed=row, log_prob=False, grammar=grammar)
                self._session.start(row, rules, np.zeros(1, np.int32), 1)
                self._held[row], self._rest[row] = grammar, list(tokens)
                self._which[row] += 1
        return [rest.pop(0) for rest in self._rest]


def draw_seconds(session: Session, rows: Rows, slots: Int32, logits: np.ndarray, count: int) -> float:
    """Mean seconds of one step's draws."""
    seconds = 0.0
    for _ in range(count):
        tokens = rows.next_tokens()
        before = logits[slots, tokens].copy()
        logits[slots, tokens] = HIGHEST
        begin = time.perf_counter()
        drawn = session.draw(slots, logits, logits)
        seconds += time.perf_counter() - begin
        assert drawn.ids[0].tolist() == tokens, "a row has left its instance"
        logits[slots, tokens] = before
    return seconds / count


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("tokenizer_dir", type=Path, help="with a tokenizer.json of no more tokens than the engine has")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=128, help="tokens of each row in the KV cache")
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_dir(options.tokenizer_dir)
    guides = Guides(options.tokenizer_dir, {max(tokenizer.special_ids, default=0)})
    ways = list(paths(guides, tokenizer))
    loaded = load_engine(options.engine, runtime_config(max_batch_size=options.rows))
    session, plan = loaded.session, loaded.engine.plan
    assert isinstance(session, TimedSession), "an engine for the CPU"
    draw, slots = np.random.default_rng(0), np.arange(options.rows, dtype=np.int32)
    logits = draw.standard_normal((options.rows, plan.vocab_size), np.float32)
    ids = draw.integers(0, plan.vocab_size, options.rows).astype(np.int32)
    found: dict[str, list[float]] = {"a step": [], "its draws, free": [], "its draws, guided": []}
    guided, free = (Rows(session, each, ways, options.rows) for each in (guides, None))
    for _ in range(options.rounds + 1):
        run = TimedRun(session, plan, sequences=options.rows, length=options.context + 1)
        found["a step"].append(statistics.median(run.decode(ids, options.context).seconds for _ in range(7)))
        for name, rows in (("its draws, free", free), ("its draws, guided", guided)):
            rows.begin()
            found[name].append(draw_seconds(session, rows, slots, logits, options.steps))
    session.close()
    print(f"{options.rows} rows, {sum(len(tokens) for _, tokens in ways)} tokens in {len(ways)} instances")
    print("| | ms, median of rounds |\n|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {1e3 * statistics.median(seconds[1:]):.2f} |")
    shares = [(c - b) / (a + c - b) for a, b, c in itertools.islice(zip(*found.values(), strict=True), 1, None)]
    print(f"| share of grammars | {statistics.median(shares):.1%} |")


if __name__ == "__main__":
    main()
