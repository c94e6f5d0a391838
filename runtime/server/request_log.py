"""Every answer is counted and, unless it is switched off, logged in one line."""

import logging
from collections.abc import Mapping

from ingot.runtime.server.metrics import Metrics

_LOG = logging.getLogger("ingot.server")


class RequestLog:
    """lines: whether there are lines beside the counts."""

    def __init__(self, metrics: Metrics, *, lines: bool) -> None:
        self._metrics, self._lines = metrics, lines

    def note(
        self,
        outcome: str,
        *,
        route: str,
        status: int,
        request_id: str,
        fields: Mapping[str, object],
        is_quiet: bool = False,
    ) -> None:
        """An answer is out. outcome: in a word; fields: more of its line; is_quiet: it is only counted."""
        self._metrics.answered(route, status)
        if self._lines and not is_quiet:
            known = {"request_id": request_id, "route": route, "status": status}
            _LOG.info("%s", outcome, extra={**known, **fields})
