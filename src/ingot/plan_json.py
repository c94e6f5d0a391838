"""Plans back from JSON, every value checked: the text must be the one that `plans_to_json` writes for what it says.

So a key that is there twice, that nobody knows, or a number in another spelling is refused, as is everything that no
build writes: see `plan_check.py`.
"""

import json

from ingot.configs.exact import read_exactly
from ingot.configs.read import parse_json
from ingot.errors import REBUILD, ConfigError, EngineError
from ingot.plan import PLAN_SCHEMA, Plan
from ingot.plan_check import check_plan

UNREADABLE = "the engine's plan is not readable"


def plan_from_json(text: str, where: str = "plan") -> Plan:
    """Inverse of `Plan.to_json`. Raises EngineError on anything else."""
    document = _parse(text, where)
    plan = plan_from_document(document, where)
    _require_canonical(_canonical(document, where), text, where)
    return plan


def plans_of_targets(text: str, where: str = "plans") -> dict[str, object]:
    """Target → the parsed JSON of its plan, of what `plans_to_json` writes; `plan_from_document` reads it. Raises
    EngineError on anything else."""
    document = _parse(text, where)
    if not isinstance(document, dict):
        raise _unreadable(where, "an object with a plan for each target", f"a JSON {type(document).__name__}")
    _require_canonical(_canonical(document, where), text, where)
    return document


def plan_from_document(document: object, where: str) -> Plan:
    """The plan that parsed JSON holds. Raises EngineError for whatever no build writes."""
    plan = _read(document, where)
    _require_canonical(plan.to_json(), _canonical(document, where), where)
    return plan


def _canonical(document: object, where: str) -> str:
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise _unreadable(where, "JSON nested as plans are", str(error)) from error


def _parse(text: str, where: str) -> object:
    try:
        return parse_json(text.encode(), where)
    except (UnicodeEncodeError, ConfigError) as error:
        got = error.got if isinstance(error, ConfigError) else None
        raise _unreadable(where, "JSON in UTF-8", got or str(error)) from error


def _read(document: object, where: str) -> Plan:
    if not isinstance(document, dict):
        raise _unreadable(where, "an object", f"a JSON {type(document).__name__}")
    fields = dict(document)
    schema = fields.pop("plan_schema", None)
    if type(schema) is not int or schema != PLAN_SCHEMA:
        raise EngineError(
            "the engine's plan was written by another version of ingot",
            where=f"{where}.plan_schema",
            expected=str(PLAN_SCHEMA),
            got=repr(schema)[:200],
            hint="rebuild the engine with this version of ingot",
        )
    plan = read_exactly(Plan, fields, what=UNREADABLE, where=where, error=EngineError, hint=REBUILD)
    check_plan(plan, where)
    return plan


def _require_canonical(written: str, text: str, where: str) -> None:
    if written == text:
        return
    at = next((i for i, (a, b) in enumerate(zip(written, text, strict=False)) if a != b), min(len(written), len(text)))
    begin = max(at - 20, 0)
    raise EngineError(
        "the engine's plan is not in its canonical form",
        where=f"{where}, character {at}",
        expected=json.dumps(written[begin : at + 20]),
        got=json.dumps(text[begin : at + 20]),
        hint=REBUILD,
    )


def _unreadable(where: str, expected: str, got: str) -> EngineError:
    return EngineError(UNREADABLE, where=where, expected=expected, got=got, hint=REBUILD)
