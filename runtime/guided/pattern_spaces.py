r"""White space in patterns of JSON schemas.

What \s matches differs: ECMA-262 (section 22.2.2.9, which JSON Schema recommends) has U+FEFF and lacks U+0085, Unicode
has U+0085, Python has U+001C to U+001F too. An answer shall fit its schema for every validator, so \s becomes what all
three match, and \S what none of them takes for white space.
"""

_COMMON = r"\t\n\x0b\f\r " + "\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY = _COMMON + "\u001c-\u001f\u0085\ufeff"


def with_common_spaces(pattern: str) -> str:
    r"""The pattern with classes of characters in place of \s and \S."""
    found, depth, negated, at = list[str](), 0, False, 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if depth and piece in (r"\s", r"\S"):
            some, none = (_ANY, _COMMON) if negated else (_COMMON, _ANY)
            piece = some if piece == r"\s" else f"[^{none}]"
        elif piece in (r"\s", r"\S"):
            piece = f"[{_COMMON}]" if piece == r"\s" else f"[^{_ANY}]"
        elif piece == "[" and not depth:
            depth, negated = 1, pattern[at : at + 1] == "^"
        elif piece == "]":
            depth = 0
        found.append(piece)
    return "".join(found)
