"""Finds stop texts in a text that comes piece by piece, wherever its tokens begin and end.

stop "\n\nQ:"      text so far   ... the end.\n\n        given out   ... the end.      held   \n\n
"""

from collections.abc import Sequence


class StopText:
    """Gives out everything that no stop text can begin with any more.

    include  keep the stop text in the text
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that is certain now, the stop text that was found or None). The first stop text to end is found.

        may_stop  False: what ends in this piece does not count
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found and may_stop:
            end, begin, stop = min(found)
            self._held = ""
            return text[: end if self._include else begin], stop
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """What is held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
