"""Rules or schemas that lead to others: a chain that is too long would overflow the stack of the library, which follows
it by recursion, and end the process.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.guided.reach import lark_schemas, rules_behind
from ingot.runtime.json_pointer import resolved

LONGEST_OF_SCHEMAS = 900  # objects inside or behind each other; 1,800 were seen to compile, and 3,000 not to
_FOR_OTHERS = ("$defs", "definitions")
LONGEST_OF_RULES = 1000  # 2,000 were seen to compile, and 4,000 not to


def longest_chain(behind: Mapping[str, Collection[str]], sizes: Mapping[str, int] | None = None) -> int:
    """The largest sum of sizes on a way through a graph: name → names behind it; sizes: 1 each, unless said.

    What lies on one circle counts as a whole, so the result is a bound where there are circles. Components by
    Kosaraju's algorithm (Sharir 1981), without recursion.
    """
    before: dict[str, list[str]] = {name: [] for name in behind}
    for name, found in behind.items():
        for each in found:
            before[each].append(name)
    left = list(_left(behind, behind))
    component: dict[str, int] = {}
    longest: list[int] = []
    for start in reversed(left):  # components in topological order
        if start in component:
            continue
        members = list(_left(before, (start,), component))
        number = len(longest)
        component.update(dict.fromkeys(members, number))
        whole = sum(sizes[each] if sizes else 1 for each in members)
        earlier = (component[each] for member in members for each in before[member])
        longest.append(whole + max((longest[each] for each in earlier if each != number), default=0))
    return max(longest, default=0)


def _left(graph: Mapping[str, Collection[str]], starts: Collection[str], done: Collection[str] = ()) -> Iterator[str]:
    """Names in the order in which a search in depth leaves them."""
    seen: set[str] = set()
    for start in starts:
        if start in seen or start in done:
            continue
        seen.add(start)
        stack = [(start, iter(graph[start]))]
        while stack:
            name, rest = stack[-1]
            for each in rest:
                if each not in seen and each not in done:
                    seen.add(each)
                    stack.append((each, iter(graph[each])))
                    break
            else:
                stack.pop()
                yield name


def refuse_chain_of_schemas(schema: Mapping[str, Any], where: str) -> None:
    """Schemas that refer to others. Raises RequestError."""
    behind: dict[str, Collection[str]] = {}
    sizes: dict[str, int] = {}
    waiting = ["#"]
    while waiting:
        name = waiting.pop()
        if name not in behind:
            found, sizes[name] = _references(resolved(name, schema))
            behind[name] = found
            waiting += found
    length = longest_chain(behind, sizes)
    if length > LONGEST_OF_SCHEMAS:
        _refuse("a schema refers to others in too long a chain", where, LONGEST_OF_SCHEMAS, length)


def refuse_chains_in_lark(text: str, where: str) -> None:
    """Rules that name others, and schemas inside the grammar. Raises RequestError."""
    length = longest_chain(rules_behind(text))
    if length > LONGEST_OF_RULES:
        _refuse("a grammar's rules name others in too long a chain", where, LONGEST_OF_RULES, length)
    for schema in lark_schemas(text):
        refuse_chain_of_schemas(schema, where)


def _refuse(words: str, where: str, most: int, length: int) -> None:
    raise RequestError(
        f"structured_outputs: {words}",
        where=where,
        expected=f"a chain of at most {most}",
        got=str(length),
        hint="replace references by what they refer to, or simplify it",
    )


def _references(schema: Any) -> tuple[set[str], int]:
    """(what a value refers to inside its document, how deep objects stand in it), without what it defines for others"""
    found: set[str] = set()
    deepest = 1
    stack = [(schema, 1)]
    while stack:
        each, deep = stack.pop()
        deepest = max(deepest, deep)
        if isinstance(each, Mapping):
            reference = each.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                found.add(reference)
            inner = (
                value for key, value in each.items() if key not in _FOR_OTHERS and isinstance(value, Mapping | list)
            )
            stack += ((value, deep + 1) for value in inner)
        elif isinstance(each, list):
            stack += ((value, deep) for value in each)
    return found, deepest
