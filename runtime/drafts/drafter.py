"""What makes drafts: the contract between `Drafting`, which decides how many each request gets, and their makers."""

from collections.abc import Mapping
from typing import Protocol

from ingot.runtime.request import Request
from ingot.step_io import Int32


class Drafter(Protocol):
    """Makes drafts for requests that decode."""

    def match(self, request: Request, most: int) -> tuple[int, int]:
        """How many drafts it can make now, at most `most`, and how far they rest on what came before: the larger this
        number, the likelier they are right. Drafts of equal numbers are expected to be right equally often."""
        ...

    def seconds(self, requests: int, depth: int) -> float:
        """How long it takes to make up to `depth` drafts for each of this many requests."""
        ...

    def make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        """Drafts for each of these requests, as many as it says or fewer, after `match` has been asked."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
