"""Texts of a wire format as a reader sees them: what is a token of the model becomes one character that no text has.

    <tool_call>\\n<function=      a token, and six letters and more        \\ud800\\n<function=

Half of a surrogate pair is not a character, and no tokenizer makes one; so letters that read like a token stay letters.
"""

import re
from collections.abc import Container, Iterable, Mapping

_FIRST = 0xD800
MOST = 0x800


class Markers:
    """Characters for tokens of one tokenizer. characters: by token. special: characters of tokens that are not text."""

    def __init__(self, tokens: Mapping[str, int], texts: Iterable[str], special_ids: Container[int] = ()) -> None:
        """tokens: text → id of the control tokens. texts: of the formats in use."""
        joined = "\n".join(texts)
        used = sorted((text for text in tokens if text and text in joined), key=len, reverse=True)[:MOST]
        self._character = {text: chr(_FIRST + place) for place, text in enumerate(used)}
        self._text = {character: text for text, character in self._character.items()}
        self.characters = {tokens[text]: character for text, character in self._character.items()}
        self.special = [each for number, each in self.characters.items() if number in special_ids]
        self._pattern = re.compile("|".join(map(re.escape, used)) or "(?!)")
        self._any = re.compile("[\ud800-\udfff]")

    def coded(self, text: str) -> str:
        """How a text of a format is searched for. If several tokens begin at a place, the longest counts."""
        return self._pattern.sub(lambda found: self._character[found[0]], text)

    def plain(self, text: str) -> str:
        """With the letters of every token."""
        return self._any.sub(lambda found: self._text.get(found[0], ""), text) if self._any.search(text) else text

    def tokens(self, text: str) -> tuple[int, ...] | None:
        """The ids of a text that is made of tokens alone; None where it has letters of its own."""
        ids = {character: number for number, character in self.characters.items()}
        coded = self.coded(text.strip())
        return tuple(ids[each] for each in coded) if all(each in ids for each in coded) else None
