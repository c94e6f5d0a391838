"""The decode server's part: have a prompt computed by a prefill server, fetch its blocks, and put them into the cache.

    lacking blocks ──POST /kv/prefill──▶ offer of a lease ──▶ cached blocks ──DELETE──▶ begin
                                                 shared memory, else GET; or NIXL

Whatever goes wrong is logged and counted, and the request begins without the blocks: then this server computes the
prompt, with the same bits. A prefill server that could not be reached is left alone for a while.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np

from ingot import __version__
from ingot.configs.serve import ServeConfig
from ingot.engine import Engine
from ingot.errors import IngotError
from ingot.runtime.kv_transfer import BlockRange, BlockTransfer, Bytes, checksum
from ingot.runtime.request import Request
from ingot.runtime.server.kv_leases import HEAD, blocks_of, map_lease
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.nixl_blocks import NixlReader
from ingot.runtime.server.openai_format import Json

Value = TypeVar("Value", str, int)

_LOG = logging.getLogger("ingot.server")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_THREADS = 32  # prompts that are fetched at once; further ones are computed here
_REST = 5.0  # seconds in which a server that failed is not asked again
_PATIENCE = 5.0  # seconds to connect, and for an answer that needs no step
_MOST_WORDS = 1 << 20  # bytes of an answer that is no block


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A request that has not begun, and the salt of its blocks."""

    request: Request
    cache_salt: str


class FetchError(Exception):
    """Why blocks did not come. rest: whether the server is to be left alone for a while."""

    def __init__(self, reason: str, *, rest: bool = False) -> None:
        super().__init__(reason)
        self.rest = rest


def engine_digest(engine: Engine) -> str:
    """Equal where the same kernels compute the same blocks from the same weights, whatever ranks these are divided
    among: Checkpoint, program, target and version."""
    manifest = engine.manifest
    made = [__version__, manifest.target, manifest.checkpoint, manifest.program]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()


def machine() -> str:
    """Equal for processes that run under the same kernel."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else ""


class PrefillClient:
    """For the event loop of one service; fetches in threads of its own. digest: see `engine_digest`."""

    def __init__(self, transfer: BlockTransfer, digest: str, config: ServeConfig, metrics: Metrics) -> None:
        self._transfer, self._digest, self._config, self._metrics = transfer, digest, config, metrics
        self._key = config.api_keys[0] if config.api_keys else None
        self._urls = itertools.cycle(config.prefill_urls)
        self._resting: dict[str, float] = {}  # until when, time.monotonic()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ingot fetch")
        self._at_work = 0
        self._nixl = NixlReader() if config.kv_transport == "nixl" else None

    async def fetch(self, wanted: Sequence[Wanted], stopped: "asyncio.Future[Exception]") -> None:
        """Return when the blocks are in the cache, or no more will come; at once when nobody wants them."""
        calls = [_Call() for _ in wanted]
        for call in calls:
            stopped.add_done_callback(call.abort)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self._config.prefill_timeout, call.expire) for call in calls]
        own = []
        for each, call in zip(wanted, calls, strict=True):
            if self._at_work == _THREADS:
                self._count("computed here", f"{_THREADS} prompts are being fetched")
                continue
            self._at_work += 1
            own.append(loop.run_in_executor(self._threads, self._fetch, each, call))
            own[-1].add_done_callback(self._done)
        if own:
            await asyncio.wait(own)
        for call, timer in zip(calls, timers, strict=True):
            stopped.remove_done_callback(call.abort)
            timer.cancel()

    def close(self) -> None:
        """Wait for what runs: it ends with its time at the latest."""
        self._threads.shutdown()
        if self._nixl is not None:
            self._nixl.close()

    def _done(self, future: "asyncio.Future[None]") -> None:
        self._at_work -= 1
        if not future.cancelled() and (error := future.exception()) is not None:
            _LOG.error("fetching blocks has failed, which is a bug of ingot: %r", error)

    def _fetch(self, wanted: Wanted, call: "_Call") -> None:
        """In a thread."""
        size = self._transfer.tokens_per_block
        try:
            lacking = self._transfer.lacking(wanted.request)
            if lacking is None or (lacking.count - lacking.first) * size < self._config.prefill_min_tokens:
                self._count("short or cached")
                return
        except IngotError as error:
            self._count("computed here", str(error))
            return
        reason = ""  # why other servers rest has been logged
        while (url := self._choose()) is not None:
            try:
                nbytes = self._fetch_from(url, wanted, lacking, call)
            except (FetchError, IngotError, OSError, http.client.HTTPException) as error:
                if call.aborted:
                    self._count("aborted")
                    return
                reason = f"{url}: {error or type(error).__name__}"
                if call.late:
                    reason = f"{url}: they have not come within {self._config.prefill_timeout:g} s (--prefill_timeout)"
                    self._resting[url] = time.monotonic() + _REST
                    break
                if isinstance(error, IngotError) or (isinstance(error, FetchError) and not error.rest):
                    break
                self._resting[url] = time.monotonic() + _REST
            else:
                self._count("fetched")
                self._metrics.blocks_moved("in", nbytes)
                return
        self._count("computed here", reason)

    def _choose(self) -> str | None:
        """The next server in turn that does not rest, if any: what made them rest has been logged."""
        now = time.monotonic()
        for url in itertools.islice(self._urls, len(self._config.prefill_urls)):
            if self._resting.get(url, 0.0) <= now:
                return url
        return None

    def _fetch_from(self, url: str, wanted: Wanted, lacking: BlockRange, call: "_Call") -> int:
        """Bytes that came."""
        request, size = wanted.request, self._transfer.tokens_per_block
        asked = {
            "engine": self._digest,
            "token_ids": request.tokens[: lacking.count * size].tolist(),
            "cache_salt": wanted.cache_salt,
            "first_block": lacking.first,
            "transport": self._config.kv_transport,
        }
        body = json.dumps(asked).encode()
        seconds = self._config.prefill_timeout + _PATIENCE  # the call expires before that
        offer = _object(self._ask(url, "POST", "/kv/prefill", call, body, seconds=seconds))
        lease = _field(offer, "lease", str)
        try:
            return self._take(url, offer, lease, lacking, call)
        finally:
            if not call.late:  # else the lease expires by itself: no more time is spent on this server
                with contextlib.suppress(FetchError, OSError, http.client.HTTPException):
                    self._ask(url, "DELETE", f"/kv/leases/{lease}", _Call(), seconds=_PATIENCE)

    def _take(self, url: str, offer: Json, lease: str, lacking: BlockRange, call: "_Call") -> int:
        first, count = _field(offer, "first_block", int), _field(offer, "blocks", int)
        if not lacking.first <= first <= count <= lacking.count:
            raise FetchError(f"it offers blocks {first} to {count} of {lacking.first} to {lacking.count}", rest=True)
        blocks = BlockRange(first=first, count=count, keys=lacking.keys[:count])
        nbytes = self._transfer.nbytes(blocks)
        if offer.get("last_key") != blocks.last_key or offer.get("bytes") != nbytes:
            raise FetchError("it offers other blocks than those of the prompt", rest=True)
        data = self._move(url, offer, lease, nbytes, call)
        if len(data) != nbytes or checksum(data) != offer.get("crc32"):
            raise FetchError("the bytes of the blocks are damaged")
        call.require_wanted()
        self._transfer.write(blocks, data)
        return nbytes

    def _move(self, url: str, offer: Json, lease: str, nbytes: int, call: "_Call") -> Bytes:
        """The bytes of a lease, not checked yet."""
        if self._nixl is not None:
            agent, address = _field(offer, "agent", str), _field(offer, "address", int)
            whole = self._nixl.read(url, agent, address, HEAD + nbytes, call.require_wanted)
            if (data := blocks_of(whole, lease)) is None:
                raise FetchError("the memory of the lease was given back before it was read")
            return data
        here = machine()
        if here and offer.get("machine") == here:
            mapped = map_lease(_field(offer, "path", str), lease, nbytes)
            if mapped is not None:
                return mapped
        path = f"/kv/leases/{lease}"
        return np.frombuffer(self._ask(url, "GET", path, call, seconds=_PATIENCE, most=nbytes), np.uint8)

    def _ask(
        self,
        url: str,
        method: str,
        path: str,
        call: "_Call",
        body: bytes | None = None,
        *,
        seconds: float,
        most: int = _MOST_WORDS,
    ) -> bytes:
        """The body of an answer. Raises FetchError for any other answer than 200, and for more than `most` bytes.

        seconds  without a byte after which it fails
        """
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE)
        headers = {"connection": "close", "content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
            call.hold(connection.sock)
            connection.sock.settimeout(seconds)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read(max(most, _MOST_WORDS) + 1)
        finally:
            call.let_go()
            connection.close()
        if answer.status != 200:
            raise FetchError(f"{answer.status}, {_words(data)}", rest=answer.status in (401, 404, 409))
        if len(data) > most:
            raise FetchError(f"its answer to {path} has more than {most} bytes", rest=True)
        if answer.length:  # http.client does not mind, if it is told how much to read
            raise FetchError(f"its answer to {path} ends {answer.length} bytes too early", rest=True)
        return data

    def _count(self, outcome: str, reason: str = "") -> None:
        self._metrics.prompt_fetched(outcome)
        if reason:
            _LOG.warning(
                "this server computes a prompt itself, because its blocks did not come: %s; look at the prefill server",
                reason,
            )


class _Call:
    """A socket that another thread may cut off. aborted: nobody wants what it brings; late: its time is over."""

    def __init__(self) -> None:
        self.aborted = self.late = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def require_wanted(self) -> None:
        """Raises FetchError where it is too late."""
        if self.aborted or self.late:
            raise FetchError("aborted" if self.aborted else "late")

    def hold(self, held: socket.socket) -> None:
        """From now on this one. Raises FetchError where it is too late."""
        with self._lock:
            self.require_wanted()
            self._socket = held

    def let_go(self) -> None:
        """Nothing is to be cut off any more."""
        with self._lock:
            self._socket = None

    def abort(self, _: object = None) -> None:
        """End the call; the other side sees that nobody waits any more."""
        with self._lock:
            self.aborted = True
            self._cut_off()

    def expire(self) -> None:
        """End the call, whose time is over."""
        with self._lock:
            self.late = True
            self._cut_off()

    def _cut_off(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _object(data: bytes) -> Json:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FetchError("its answer is not a JSON object", rest=True)
    return found


def _field(offer: Json, name: str, kind: type[Value]) -> Value:
    value = offer.get(name)
    if type(value) is not kind:
        raise FetchError(f"its offer lacks {name}", rest=True)
    return value


def _words(data: bytes) -> str:
    """What an answer that is an error says."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(data)["error"]["message"])[:400]
    return "and no message"
