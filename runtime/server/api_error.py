"""Refusals and failures as OpenAI's clients read them: {"error": {message, type, param, code}}."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from ingot.errors import CapacityError, IngotError

NO_TOKEN = "leave no token to choose"  # words of step_batch.failed_requests
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients follow it


class ApiError(Exception):
    """An answer that is an error. `kind` is OpenAI's `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """What is sent."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@contextlib.contextmanager
def said_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that the client sent. names: field of a chat or of SamplingParams → the client's, whose
    parts have other names"""
    try:
        yield
    except ApiError as error:
        for ours, theirs in names.items():
            error.message = re.sub(rf"\b{ours}\b(?:\.\w+)*", theirs, error.message)
            if error.param is not None and error.param.split(".")[0] == ours:
                error.param = theirs
        raise


class ClientGoneError(Exception):
    """Nobody is there to answer."""


def refused(error: IngotError) -> ApiError:
    """A request that was found wrong before it ran."""
    first = error.what.split()[0].rstrip(":")
    param = first if "_" in first or first in ("temperature", "stop", "seed", "n", "tools") else None
    too_long = isinstance(error, CapacityError) or "max_seq_len" in str(error) or "max_input_len" in str(error)
    return ApiError(400, in_one_line(error), param=param, code="context_length_exceeded" if too_long else None)


def failed(error: IngotError) -> ApiError:
    """A request that failed while it ran: by banning every token, which is its own doing, or through the engine."""
    if NO_TOKEN in error.what:
        return refused(error)
    return ApiError(500, in_one_line(error), kind="server_error", code="step_failed", headers=_NO_RETRY)


def in_one_line(error: IngotError) -> str:
    """The words of an error without line breaks."""
    parts = [error.what if error.where is None else f"{error.what} ({error.where})"]
    if error.expected is not None:
        parts.append(f"expected {error.expected}")
    if error.got is not None:
        parts.append(f"got {error.got}")
    if error.hint is not None:
        parts.append(error.hint)
    return "; ".join(parts)


def cancelled() -> ApiError:
    """Somebody cancelled the request by its id."""
    return ApiError(
        499, "the request was cancelled", kind="request_cancelled", code="request_cancelled", headers=_NO_RETRY
    )


def timed_out(seconds: float) -> ApiError:
    """The request did not end in time."""
    return ApiError(
        408,
        f"the request did not end within {seconds:g} s",
        kind="timeout",
        code="deadline_exceeded",
        headers=_NO_RETRY,
    )


def malformed(reason: str, status: int) -> ApiError:
    """What came is not HTTP, or not in a form that this server reads. status: 400, 431 or 501."""
    return ApiError(status, f"the request cannot be read as HTTP: {reason[:200]}", code="malformed_http")


def shutting_down(retry_after: float) -> ApiError:
    """The server goes away; another one may take the request."""
    return ApiError(
        503,
        "the server is shutting down",
        kind="service_unavailable",
        code="shutting_down",
        headers={"retry-after": str(max(1, round(retry_after)))},
    )


def not_ready(reason: str) -> ApiError:
    """The server cannot make tokens now."""
    return ApiError(
        503,
        f"the server is not ready: {reason}",
        kind="service_unavailable",
        code="not_ready",
        headers={"retry-after": "5"},
    )
