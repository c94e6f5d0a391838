"""What grammars cost here: to compile each of our own schemas, and a mask for each token of an instance.

python -m tests.programs.grammar_costs TOKENIZER_DIR [--rounds 5]

TOKENIZER_DIR has a tokenizer.json. Prints milliseconds to compile, and microseconds of mask and consume. Every compile
is a first one: no grammar is found in the cache. The tokenizer of grammars is made before.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.runtime.guided.grammars import schema_text
from ingot.runtime.guided.guides import Guides
from ingot.runtime.tokenizer import Tokenizer

Instance = tuple[dict[str, Any], Any]
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schemas() -> Iterator[Instance]:
    """Schemas as requests have them, each with an instance."""
    yield _PERSON, {"name": "Ada Lovelace", "age": 36}
    yield {"type": "array", "items": _PERSON, "maxItems": 20}, [{"name": f"Person {n}", "age": n} for n in range(12)]
    yield {"enum": [f"choice {n}" for n in range(200)]}, "choice 117"
    yield {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, "a text of some length, with words"
    dated = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]}
    yield dated, {"at": "2026-11-24T12:30:00Z"}
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
            }
        },
    }
    yield tree, {"value": 1.5, "children": [{"value": 2, "children": []}, {"value": -3e4}]}
    for count in (10, 100, 500):
        names = [f"field_{n}" for n in range(count)]
        wide = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names[:5]}
        yield wide, {name: "word " * 3 for name in names[:12]}
    deep: dict[str, Any] = {"type": "integer"}
    value: Any = 7
    for _ in range(20):
        deep, value = {"type": "object", "properties": {"a": deep}, "required": ["a"]}, {"a": value}
    yield deep, value


def measure(guides: Guides, tokenizer: Tokenizer, rounds: int) -> dict[str, list[float]]:
    """Seconds: of compiling, of masks, of consuming."""
    found: dict[str, list[float]] = {"compile": [], "mask": [], "consume": []}
    for round_, (schema, instance) in itertools.product(range(rounds), schemas()):
        text = schema_text({**schema, "$comment": f"round {round_}"})
        begin = time.perf_counter()
        matcher = guides.compile("json_schema", text)
        found["compile"].append(time.perf_counter() - begin)
        for token in tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False):
            begin = time.perf_counter()
            mask = matcher.allowed()
            middle = time.perf_counter()
            if not mask[token // 32] >> token % 32 & 1:
                break  # cut in another way than the grammar wants it
            matcher.consume(token)
            found["mask"].append(middle - begin)
            found["consume"].append(time.perf_counter() - middle)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def lines(found: dict[str, list[float]]) -> list[str]:
    """A table."""
    rows = ["| | n | p50 | p99 | mean | worst |", "|---|---|---|---|---|---|"]
    for name, unit, scale in (("compile", "ms", 1e3), ("mask", "us", 1e6), ("consume", "us", 1e6)):
        values = [each * scale for each in found[name]]
        figures = (percentile(values, 0.5), percentile(values, 0.99), statistics.mean(values), max(values))
        rows.append(f"| {name}, {unit} | {len(values)} | " + " | ".join(f"{each:.1f}" for each in figures) + " |")
    return rows


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_dir(options.tokenizer_dir)
    guides = Guides(options.tokenizer_dir, {max(tokenizer.special_ids, default=0)})
    guides.compile("regex", "a")
    print("\n".join(lines(measure(guides, tokenizer, options.rounds))))


if __name__ == "__main__":
    main()
