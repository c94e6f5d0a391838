"""Plans back from JSON, every value checked: the text must be the one that `plans_to_json` writes for what it says.

So a key that is there twice, that nobody knows, or a number in another spelling is refused, as is everything that no
build writes: see `plan_check.py`.
"""

import json

from ingot.configs.exact import read_exactly
from ingot.configs.read import parse_json
from ingot.errors import REBUILD, ConfigError, EngineError
from ingot.plan import PLAN_SCHEMA, Plan, plans_to_json
from ingot.plan_check import check_plan

UNREADABLE = "the engine's plan is not readable"


def plan_from_json(text: str, where: str = "plan") -> Plan:
    """Inverse of `Plan.to_json`. Raises EngineError on anything else."""
    plan = _read(_parse(text, where), where)
    _require_canonical(plan.to_json(), text, where)
    return plan


def plans_from_json(text: str, where: str = "plans") -> dict[str, Plan]:
    """Inverse of `plans_to_json`. Raises EngineError on anything else."""
    document = _parse(text, where)
    if not isinstance(document, dict):
        raise _unreadable(where, "an object with a plan for each target", f"a JSON {type(document).__name__}")
    plans = {target: _read(each, f"{where}:{target}") for target, each in document.items()}
    _require_canonical(plans_to_json(plans), text, where)
    return plans


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
            "the engine's plan has another schema",
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
