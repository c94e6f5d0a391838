"""What all handlers share: the service, the names of the model, and the way from a body to a generation."""

import fnmatch
import hashlib
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from ingot import __version__
from ingot.errors import RequestError
from ingot.runtime.server.answer_format import names_of_form
from ingot.runtime.server.api_error import ApiError, not_ready, refused, said_as
from ingot.runtime.server.body import AnyBody, read_body
from ingot.runtime.server.generation import Generation, Order
from ingot.runtime.server.health import Result
from ingot.runtime.server.ids import Ids
from ingot.runtime.server.json_pieces import json_blocks
from ingot.runtime.server.middleware import limited_body
from ingot.runtime.server.openai_format import Json, ResponseHead
from ingot.runtime.server.protocol import Generate
from ingot.runtime.server.sampling_params import most_tokens
from ingot.runtime.server.service import Service
from ingot.runtime.text_stream import TextRequest

_SMALL = 8 << 10  # bytes of a body


class ApiBase:
    """See above."""

    def __init__(self, service: Service) -> None:
        self._service, self._config, self._ids = service, service.config, Ids()
        engine = service.runner.engine
        self._names = self._config.model_names or (engine.directory.resolve().name,)
        digest = hashlib.sha256(engine.manifest.to_json().encode()).hexdigest()
        self._fingerprint = f"ingot-{__version__}-{digest[:12]}"

    def _why_not(self) -> str | None:
        if self._service.texts.failure is not None:
            return self._service.texts.failure
        return "the server is shutting down" if self._service.draining else self._service.health.stalled()

    async def _read(self, request: Request, kind: type[AnyBody], use: Callable[[AnyBody], Result]) -> Result:
        """What `use` makes of a body: of small ones at once, of others beside the event loop."""
        data = await limited_body(request, self._config.max_body_bytes, self._config.body_timeout)

        def work() -> Result:
            asked = read_body(kind, data)
            if asked.model is not None:
                self._check_model(asked.model)
            try:
                return use(asked)
            except RequestError as error:
                raise refused(error) from None

        return work() if len(data) <= _SMALL else await self._service.aside(work)

    async def _start(
        self,
        request: Request,
        asked: Generate,
        prefix: str,
        prompts: int,
        prepare: Callable[[], list[TextRequest]],
        *,
        guided: bool,
    ) -> Generation:
        if self._service.texts.failure is not None:
            raise not_ready(str(self._why_not()))
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
        order = Order(
            answer_id=f"{prefix}-{self._ids.make()}",
            caller=request.state.caller,
            prompts=prompts,
            n=asked.n,
            timeout=asked.timeout,
            prompt_alone=most_tokens(asked) == 0,
            guided=guided,
        )
        with said_as(names_of_form(asked)):
            return await self._service.start(order, prepare, request.receive)

    def _head(self, generation: Generation) -> ResponseHead:
        return ResponseHead(
            answer_id=generation.answer_id,
            created=generation.created,
            model=self._names[0],
            fingerprint=self._fingerprint,
        )

    def _check_model(self, name: str) -> None:
        if not any(fnmatch.fnmatchcase(name, each) for each in self._names):
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )


def written(document: Json) -> Response:
    """For threads beside the event loop."""
    return Response(b"".join(json_blocks(document)), media_type="application/json")
