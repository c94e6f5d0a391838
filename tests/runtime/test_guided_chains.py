"""Chains of references and of rules: up to a length they compile, and beyond it they are refused before the library
follows them.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided.chains import LONGEST_OF_RULES, LONGEST_OF_SCHEMAS, longest_chain
from ingot.runtime.guided.grammars import make_grammar, schema_text
from ingot.runtime.guided.guides import Guides
from tests.runtime.byte_tokenizer import byte_tokenizer

VOCAB = 96


@pytest.fixture
def guides(tmp_path: Path) -> Guides:
    pytest.importorskip("llguidance", reason="needs llguidance")
    byte_tokenizer(tmp_path, VOCAB)
    return Guides(tmp_path, {VOCAB - 1})


def schemas(count: int) -> dict[str, Any]:
    """Each but the last is an object with the next in it: three levels of JSON objects."""
    inner = {
        f"a{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{number + 1}"}}, "required": ["x"]}
        for number in range(count)
    }
    return {"$defs": {**inner, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def rules(count: int) -> str:
    return "\n".join(["start: a0", *(f'a{number}: "y" a{number + 1}' for number in range(count)), f'a{count}: "z"'])


def test_chains_up_to_the_limit_compile(guides: Guides) -> None:
    guides.matcher(StructuredOutputs(json=schemas(LONGEST_OF_SCHEMAS // 3 - 1)))
    guides.matcher(StructuredOutputs(grammar=rules(LONGEST_OF_RULES - 2)))


@pytest.mark.parametrize(
    "asked",
    [
        lambda: StructuredOutputs(json=schemas(LONGEST_OF_SCHEMAS // 3)),
        lambda: StructuredOutputs(grammar=rules(LONGEST_OF_RULES - 1)),
        lambda: StructuredOutputs(grammar=f"start: %json {schemas(LONGEST_OF_SCHEMAS)}".replace("'", '"')),
    ],
    ids=["schemas", "rules", "schemas in a grammar"],
)
def test_longer_chains_are_refused(asked: Callable[[], StructuredOutputs]) -> None:
    chain = asked()
    with pytest.raises(RequestError, match="too long a chain"):
        make_grammar(chain, lambda text: text)


def test_a_schema_that_holds_itself_is_no_chain() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}, "next": {"$ref": "#/$defs/a0"}}}
    assert "child" in schema_text({**tree, "$defs": schemas(10)["$defs"]})


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_chain_is_that_of_trying_all_ways(seed: int) -> None:
    """Without circles it is exact; with them it is a bound, and at most what all names sum up to."""
    draw = random.Random(seed)
    names = [str(number) for number in range(draw.randint(1, 8))]
    sizes = {name: draw.randint(1, 5) for name in names}
    later = {name: [each for each in names[place + 1 :] if draw.random() < 0.4] for place, name in enumerate(names)}
    shuffled = dict(draw.sample(list(later.items()), len(later)))
    assert longest_chain(shuffled, sizes) == max(_longest(later, sizes, name, ()) for name in names)
    looped = {name: [*found, draw.choice(names)] for name, found in later.items()}
    best = max(_longest(looped, sizes, name, ()) for name in names)
    assert best <= longest_chain(looped, sizes) <= sum(sizes.values())


def _longest(graph: dict[str, list[str]], sizes: dict[str, int], name: str, behind: tuple[str, ...]) -> int:
    rest = (each for each in graph[name] if each not in (*behind, name))
    return sizes[name] + max((_longest(graph, sizes, each, (*behind, name)) for each in rest), default=0)
