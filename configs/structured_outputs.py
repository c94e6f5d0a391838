"""What an answer must look like, with vLLM's names."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.configs.unknown import named_arguments_only
from ingot.errors import RequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_MOST_CHOICES = 4096


@named_arguments_only({"json_schema": "say json", "gbnf": "say grammar", "lark": "say grammar"}, RequestError)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """Exactly one of the first six.

    json            a JSON schema, as a dictionary or as text: the answer is JSON that it holds for
    json_object     True: the answer is any JSON object
    regex           a regular expression for all of the answer, in the syntax of Rust's regex
    choice          texts, one of which is the answer
    grammar         a grammar: llguidance's Lark, or GBNF (with ::=), whose start is `start` or `root`
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: text in which each of these tags
                    that the model opens is filled as its schema says
    whitespace_pattern             of json: a regular expression for white space between parts; None: up to 20
    disable_any_whitespace         of json: no white space between parts
    disable_additional_properties  of json: objects whose schema lists properties have no others
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                "structured_outputs must have exactly one kind",
                expected=f"one of {', '.join(KINDS)}",
                got=" and ".join(given) or "none of them",
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"structured_outputs.{name} must be text", got=repr(value)[:100])
        if self.choice is not None:
            self._check_choice(self.choice)
        of_json = self.whitespace_pattern, self.disable_any_whitespace, self.disable_additional_properties
        if of_json != (None, False, False) and given not in (["json"], ["json_object"]):
            raise RequestError(
                "structured_outputs: whitespace_pattern, disable_any_whitespace and disable_additional_properties are "
                "about JSON",
                got=f"with {given[0]}",
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError("structured_outputs: whitespace_pattern and disable_any_whitespace exclude each other")

    @property
    def schema(self) -> Any:
        """The JSON schema of `json` and `json_object`, parsed. Raises RequestError."""
        return {"type": "object"} if self.json_object else read_json("structured_outputs.json", self.json)

    def _given(self) -> list[str]:
        """Those of the kinds that are there; json_object=False says nothing."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return [name for name in given if name != "json_object" or self.json_object]

    @staticmethod
    def _check_choice(choice: object) -> None:
        whole = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
        if not whole or not choice or len(choice) > _MOST_CHOICES or not all(isinstance(t, str) and t for t in choice):  # type: ignore[arg-type, attr-defined]
            raise RequestError(
                "structured_outputs.choice must be a list of texts",
                expected=f"1 to {_MOST_CHOICES} texts, none empty",
                got=repr(choice)[:100],
            )


def read_json(name: str, value: object) -> Any:
    """A JSON value, or one in a text. Raises RequestError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON", got=str(error)[:200]) from None
