"""Few of many cases that show all that many show, for the tests of every day; the rest are slow and run in CI.

    @pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))

A fault in the code of a precision shows in any kernel of that precision, and one in the code of an instruction set in
any kernel of that set: it needs no kernel of both.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")
Says = Callable[..., Hashable]


def often(names: Iterable[object], chosen: Collection[object]) -> list[object]:
    """For pytest.mark.parametrize: those that are not chosen are slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def first(cases: Sequence[Sequence[object]], count: int = 1) -> list[object]:
    """For pytest.mark.parametrize: the others are slow. For cases of which the first ones are much the cheapest."""
    return [*cases[:count], *(pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases[count:])]


def _values(case: Sequence[object]) -> Sequence[object]:
    return case.values if isinstance(case, ParameterSet) else case


def covering(shows: Mapping[Case, Set[object]]) -> list[Case]:
    """Few cases that show everything that is shown by any: always the first one of those with most that is new."""
    left, chosen, missing = dict(shows), list[Case](), set[object]().union(*shows.values())
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        chosen.append(best)
        missing -= left.pop(best)
    return chosen


def spanning(cases: Iterable[object], *says: Says) -> list[object]:
    """Cases for pytest.mark.parametrize. What a function says of any case, it says of one that is not slow.

    A case is one value, or a tuple of several, which the functions get as arguments. Emulated kernels are chosen with
    those that they stand in for.
    """
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    chosen = covering({_real(case): {(index, each(*case)) for index, each in enumerate(says)} for case in listed})
    return [
        pytest.param(*case, id=_id(case), marks=() if _real(case) in chosen else pytest.mark.slow) for case in listed
    ]


def _id(case: Sequence[object]) -> str:
    return "-".join(_id(each) if isinstance(each, tuple) else getattr(each, "__name__", str(each)) for each in case)


def _real(case: Sequence[object]) -> tuple[object, ...]:
    return tuple(each.removesuffix("emu") if isinstance(each, str) else each for each in case)


def values(count: int) -> list[Says]:
    """Each of a case's `count` values."""
    return [functools.partial(lambda place, *case: case[place], place) for place in range(count)]


def pairs(count: int) -> list[Says]:
    """Every two of a case's `count` values, together."""
    return [
        functools.partial(lambda first, second, *case: (case[first], case[second]), first, second)
        for first, second in itertools.combinations(range(count), 2)
    ]


def precision(kernel: str, *_: object) -> str:
    """op and dtype of its weights or cache, which includes the dtype of inputs that are rounded: "matmul.w4a8"."""
    return kernel.rsplit(".", 1)[0]


def isa(kernel: str, *_: object) -> str:
    """op, instruction set, and whether integers are multiplied: "matmul.amx.a8"."""
    op, dtype, level = kernel.split(".")
    return f"{op}.{level.removesuffix('emu')}.{'a8' * dtype.endswith('a8')}"
