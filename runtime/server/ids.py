"""Ids of requests and answers that nobody can guess: who knows one may cancel its request."""

import hashlib
import itertools
import secrets


class Ids:
    """24 hexadecimal digits each. Not from the system's random numbers: every call for these gives up the lock of the
    interpreter, and under load the event loop would wait for it again, milliseconds per request."""

    def __init__(self) -> None:
        self._key, self._count = secrets.token_bytes(32), itertools.count()

    def make(self) -> str:
        """A new one. From any thread."""
        return hashlib.blake2b(str(next(self._count)).encode(), key=self._key, digest_size=12).hexdigest()
