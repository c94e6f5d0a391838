"""Formats of strings that the library enforces too loosely, as regular expressions: days that months have, leap seconds
at midnight alone, host names without A-labels, which nothing here could decode.

Sources: RFC 3339, appendix C and section 5.7; RFC 1123; RFC 5890, section 2.3.1.
"""

from collections.abc import Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.guided.pattern_spaces import with_common_spaces
from ingot.runtime.guided.unenforced import DEEPEST, SCHEMAS_BY_NAME

_LONG_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTHS = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FOURTH = "[02468][048]|[13579][26]"  # two digits that 4 divides
_LEAP_YEAR = f"(({_FOURTH})00|[0-9]{{2}}(0[48]|[2468][048]|[13579][26]))"
_DATE = f"([0-9]{{4}}-({_LONG_MONTHS}|{_SHORT_MONTHS}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(\.[0-9]+)?"
_TIME = f"({_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}([Zz]|[+-]{_HOUR_MINUTE})|23:59:60{_FRACTION}([Zz]|[+-]00:00))"
_ANY, _END = "[A-Za-z0-9-]", "[A-Za-z0-9]"
_LABEL = f"{_END}({_END}|{_ANY}{_END}|{_ANY}{{2}}{_END}|{_ANY}({_END}{_ANY}|-{_END}){_ANY}{{0,58}}{_END})?"
_HOST_CHARACTERS = 253
_VALUES = frozenset(("enum", "const", "default", "examples", "x-guidance"))  # keywords that hold no schemas
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
}


def with_patterns(schema: Any, deep: int = DEEPEST) -> Any:
    """The schema with patterns in place of these formats, in all schemas within it; its own patterns by
    `with_common_spaces`."""
    if deep == 0:
        raise RequestError("structured_outputs.json: schemas are nested too deep", expected=f"at most {DEEPEST}")
    if isinstance(schema, list):
        return [with_patterns(each, deep - 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key, value in schema.items():  # of any keyword: a $ref can lead there
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            spell = with_common_spaces if key == "patternProperties" else str
            found[key] = {spell(name): with_patterns(each, deep - 1) for name, each in value.items()}
        elif key == "pattern" and isinstance(value, str):
            found[key] = with_common_spaces(value)
        elif key not in _VALUES:
            found[key] = with_patterns(value, deep - 1)
    name = found.get("format")
    if isinstance(name, str) and name in PATTERNS:
        del found["format"]
        limits: dict[str, Any] = {"pattern": PATTERNS[name]}
        if name == "hostname":
            limits["maxLength"] = _HOST_CHARACTERS
        if found.keys() & limits.keys():
            found["allOf"] = [*found.get("allOf", []), limits]
        else:
            found.update(limits)
    return found
