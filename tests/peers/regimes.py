"""What is timed: decode of several sequences after a short prompt or a long one, prefill of one long prompt.

Imported in every engine's environment: nothing but the standard library.
"""

import dataclasses
import re

PROMPT = 64  # tokens before a decode regime
LONG = 2048  # tokens of a prompt: more are long
DEFAULT = "decode:1,decode:8,decode:32,prefill:512,prefill:4096,decode:1@4096"
_PATTERN = re.compile(r"(decode):([0-9]+)(?:@([0-9]+))?|(prefill):([0-9]+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """kind: "decode", whose size is the number of sequences, or "prefill", whose size is the length of the prompt.

    context: tokens that the last timed step of a decode regime sees; None: the prompt is the short one.
    """

    kind: str
    size: int
    context: int | None = None

    @property
    def name(self) -> str:
        """As given by the user."""
        return f"{self.kind}:{self.size}" + ("" if self.context is None else f"@{self.context}")

    @property
    def sequences(self) -> int:
        """Requests at once."""
        return self.size if self.kind == "decode" else 1

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        if self.kind == "prefill":
            return self.size
        return PROMPT if self.context is None else self.context - (self.generated - 1)

    @property
    def generated(self) -> int:
        """Tokens that each request generates; the first one ends its prefill and does not count as decoded."""
        return 1 + min(64, max(16, 256 // self.size)) if self.kind == "decode" else 1

    @property
    def timed_tokens(self) -> int:
        """What the speed counts: decoded tokens of all requests, or those of the prompt."""
        return self.sequences * (self.generated - 1) if self.kind == "decode" else self.prompt

    @property
    def long(self) -> bool:
        """Whether its prompts are long ones."""
        return self.prompt > LONG


def parse_regimes(text: str) -> tuple[Regime, ...]:
    """`decode:8,prefill:512` → regimes; `none` → nothing. Raises ValueError with words."""
    if text in ("none", ""):
        return ()
    return tuple(dict.fromkeys(_regime(part.strip()) for part in text.split(",")))


def title(name: str) -> str:
    """Of a regime, for readers."""
    return name.replace(":", " ").replace("@", " at ")


def _regime(text: str) -> Regime:
    found = _PATTERN.fullmatch(text)
    if found is None or int(found[2] or found[5]) < 1:
        raise ValueError(
            f"{text!r} is no regime: expected decode:SEQUENCES, decode:SEQUENCES@CONTEXT or prefill:TOKENS, "
            f"as in {DEFAULT}"
        )
    regime = Regime(
        kind=found[1] or found[4], size=int(found[2] or found[5]), context=None if found[3] is None else int(found[3])
    )
    if regime.prompt < 1:
        raise ValueError(f"{text!r} decodes {regime.generated - 1} tokens, which are more context than that")
    return regime
