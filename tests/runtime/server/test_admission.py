"""Who is let in, under whose key, and how many sequences that makes: the service's counts without an engine."""

import asyncio
import types
from typing import Any

import pytest

from ingot.configs.serve import ServeConfig
from ingot.runtime.event_queue import LoopBridge
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.generation import Order
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.middleware import RequestContext, RequestGuard
from ingot.runtime.server.request_log import RequestLog
from ingot.runtime.server.service import Service


def caller(request_id: str = "r", key: int | None = None) -> RequestContext:
    return RequestContext(request_id=request_id, key=key, traceparent="")


def house(**values: Any) -> Any:
    """What a service of at most four sequences knows."""
    config = ServeConfig(request_timeout=20.0, drain_timeout=7.0)
    known = {
        "draining": False,
        "config": config,
        "sequences": 0,
        "_capacity": 4,
        "_ends": [],
        "active": {},
        "prefill": None,
    }
    return types.SimpleNamespace(**{**known, **values})


def refusal(service: Any, **order: Any) -> ApiError | None:
    try:
        Service._admit(service, Order(answer_id="a", caller=caller(), **order))
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("running", "order", "status", "param"),
    [
        (0, {"prompts": 4}, None, None),
        (3, {}, None, None),
        (2, {"n": 2}, None, None),
        (4, {}, 429, None),
        (1, {"prompts": 2, "n": 2}, 429, None),
        (0, {"prompts": 5}, 400, "prompt"),
        (0, {"n": 5}, 400, "n"),
        (0, {"prompts": 3, "n": 2}, 400, "prompt"),
        (0, {"timeout": 20.0}, None, None),
        (0, {"timeout": 20.5}, 400, "timeout"),
    ],
)
def test_there_is_room_for_so_many(running: int, order: dict[str, Any], status: int | None, param: str | None) -> None:
    found = refusal(house(sequences=running), **order)
    assert (found and found.status, found and found.param) == (status, param)


def test_a_server_that_ends_tells_the_seconds_that_it_drains() -> None:
    found = refusal(house(draining=True))
    assert found is not None
    assert (found.status, found.headers) == (503, {"retry-after": "7"})


def test_all_sequences_of_an_answer_leave_once() -> None:
    service = house(sequences=5, _idle=asyncio.Event())
    generation: Any = types.SimpleNamespace(answer_id="a", count=3, deadline=None, watch=None)
    service.active["a"] = generation
    for _ in range(2):
        Service._forget(service, generation)
        assert (service.sequences, len(service._ends), service._idle.is_set()) == (2, 3, True)


def test_a_key_cancels_its_own_requests_alone() -> None:
    stopped: list[str] = []

    def running(answer_id: str, key: int) -> Any:
        queue = types.SimpleNamespace(interrupt=lambda error: stopped.append(answer_id))
        return types.SimpleNamespace(answer_id=answer_id, caller=caller("same", key), queue=queue)

    service = house(active={name: running(name, key) for name, key in (("a", 0), ("b", 1), ("c", 1))})
    assert not Service.cancel(service, "b", 0)
    assert not Service.cancel(service, "same", None)
    assert Service.cancel(service, "same", 1)
    assert stopped == ["b", "c"]
    assert Service.cancel(service, "a", 0)
    assert stopped == ["b", "c", "a"]


def test_nothing_is_prepared_for_a_client_that_has_left() -> None:
    gone: Any = types.SimpleNamespace(given_up=True, groups=[])

    def prepare() -> list[Any]:
        raise AssertionError("the text of a request that nobody waits for")

    assert Service._streams(house(), gone, prepare) == ([], [])
    Service._submit(house(), gone, [])
    assert gone.groups == []


@pytest.mark.parametrize(("own", "words"), [(0.01, "within 0.01 s"), (None, "within 0.5 s")])
def test_a_request_ends_in_its_own_time_or_the_servers(own: float | None, words: str) -> None:
    async def start() -> Exception:
        loop = asyncio.get_running_loop()
        never = loop.create_future()
        service = house(
            config=ServeConfig(request_timeout=0.5),
            metrics=Metrics(),
            _admit=lambda order: None,
            _idle=asyncio.Event(),
            _bridge=LoopBridge(loop),
            _pool=types.SimpleNamespace(run=lambda work: never),
        )
        generation = await Service.start(service, Order(answer_id="a", caller=caller(), timeout=own), list)
        return generation.queue.stopped.result()

    error = asyncio.run(start())
    assert isinstance(error, ApiError)
    assert (error.status, words in error.message) == (408, True)


def test_keys_are_told_apart() -> None:
    async def nothing(*_: object) -> None:
        pass

    guard = RequestGuard(nothing, ("one", "two"), RequestLog(Metrics(), lines=False))
    for given, place in ((b"one", 0), (b"two", 1), (b"three", None), (b"", None)):
        for header in ((b"x-api-key", given), (b"authorization", b"Bearer " + given)):
            assert guard._key({"headers": [header]}) == place
