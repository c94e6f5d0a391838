"""What is timed: decode of several sequences after a short prompt, prefill of one long prompt.

Imported in every engine's environment: nothing but the standard library.
"""

import dataclasses

PROMPT = 64  # tokens before a decode regime
DEFAULT = "decode:1,decode:8,decode:32,prefill:512"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """kind: "decode", whose size is the number of sequences, or "prefill", whose size is the length of the prompt."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        """As given by the user."""
        return f"{self.kind}:{self.size}"

    @property
    def sequences(self) -> int:
        """Requests at once."""
        return self.size if self.kind == "decode" else 1

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return PROMPT if self.kind == "decode" else self.size

    @property
    def generated(self) -> int:
        """Tokens that each request generates; the first one ends its prefill and does not count as decoded."""
        return 1 + min(64, max(16, 256 // self.size)) if self.kind == "decode" else 1

    @property
    def timed_tokens(self) -> int:
        """What the speed counts: decoded tokens of all requests, or those of the prompt."""
        return self.sequences * (self.generated - 1) if self.kind == "decode" else self.prompt


def parse_regimes(text: str) -> tuple[Regime, ...]:
    """`decode:8,prefill:512` → regimes. Raises ValueError with words."""
    found = []
    for part in text.split(","):
        kind, colon, size = part.strip().partition(":")
        if kind not in ("decode", "prefill") or not colon or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{part!r} is no regime: expected decode:SEQUENCES or prefill:TOKENS, as in {DEFAULT}")
        found.append(Regime(kind=kind, size=int(size)))
    return tuple(dict.fromkeys(found))
