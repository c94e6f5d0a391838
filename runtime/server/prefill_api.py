"""What a server of the role `prefill` answers: it computes prompts, and leases their blocks to decode servers.

POST /kv/prefill ──▶ compute the prompt ──▶ a lease ──▶ shared memory, GET /kv/leases/{id}, or NIXL ──▶ DELETE
"""

from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ingot.configs.sampling import SamplingParams
from ingot.runtime.block_table import BlockTable
from ingot.runtime.kv_transfer import BlockRange, checksum
from ingot.runtime.request import Request as Sequence
from ingot.runtime.server.api_base import ApiBase
from ingot.runtime.server.api_error import ApiError, ClientGoneError
from ingot.runtime.server.generation import Order
from ingot.runtime.server.kv_leases import Lease
from ingot.runtime.server.openai_format import Json
from ingot.runtime.server.prefill_client import engine_digest, machine
from ingot.runtime.server.protocol import PrefillRequest
from ingot.runtime.server.service import Service
from ingot.runtime.text_stream import TextRequest

_PIECE = 1 << 20  # bytes that are written at once


class PrefillApi(ApiBase):
    """The handlers."""

    def __init__(self, service: Service) -> None:
        """Raises UsageError where blocks cannot leave the engine."""
        super().__init__(service)
        self._transfer, self._leases = service.runner.block_transfer(), service.leases
        self._digest, self._machine = engine_digest(service.runner.engine), machine()

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Method, path, handler."""
        lease = "/kv/leases/{lease_id}"
        return [("POST", "/kv/prefill", self.prefill), ("GET", lease, self.blocks), ("DELETE", lease, self.release)]

    async def prefill(self, request: Request) -> Response:
        """POST /kv/prefill."""
        asked = await self._read(request, PrefillRequest, lambda asked: asked)
        if asked.engine != self._digest:
            raise ApiError(
                409,
                f"the servers have different engines: this one has {self._digest[:16]}, the decode server "
                f"{asked.engine[:16]}; build both from one Checkpoint, for one target, with one version of ingot "
                "and the same options (--tp_size and --pp_size may differ, --sum_parts must not)",
                code="engine_mismatch",
            )
        self._leases.require(asked.transport)
        size = self._transfer.tokens_per_block
        if len(asked.token_ids) % size:
            raise ApiError(400, f"token_ids: expected whole blocks of {size}", param="token_ids", code="invalid_value")
        order = Order(answer_id=f"kv-{self._ids.make()}", caller=request.state.caller, prompt_alone=True)
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        wanted = TextRequest(prompt=asked.token_ids, params=params, cache_salt=asked.cache_salt)
        generation = await self._service.start(order, lambda: [wanted], request.receive)
        try:
            while not generation.finished:
                await generation.events()
            offer, lease = await self._stage(generation.groups[0][0].request, asked)
            if generation.given_up:
                self._leases.release(lease.lease_id)
                raise ClientGoneError
        finally:
            self._service.release(generation)
        self._service.metrics.blocks_moved("out", lease.nbytes)
        return JSONResponse(offer)

    async def blocks(self, request: Request) -> Response:
        """GET /kv/leases/{lease_id}: the bytes."""
        lease = self._leases.find(request.path_params["lease_id"])

        async def pieces() -> AsyncIterator[bytes]:
            for begin in range(0, lease.nbytes, _PIECE):
                if lease.released:  # the answer is too short then, which the other server sees
                    return
                yield lease.data[begin : begin + _PIECE].tobytes()

        headers = {"content-length": str(lease.nbytes)}
        return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)

    async def release(self, request: Request) -> Response:
        """DELETE /kv/leases/{lease_id}."""
        lease = self._leases.find(request.path_params["lease_id"])
        self._leases.release(lease.lease_id)
        return JSONResponse({"released": True})

    async def refuse(self, request: Request) -> Response:
        """What only decode servers answer."""
        raise ApiError(
            400,
            f"{request.scope['path']}: this server computes prompts for decode servers (--role prefill); send "
            "requests to one of these",
            code="prefill_server",
        )

    async def _stage(self, computed: Sequence, asked: PrefillRequest) -> tuple[Json, Lease]:
        """Blocks of a prompt that has been computed, in memory of their own, and what is said about them."""
        table = BlockTable()
        table.root = computed.blocks.root
        tokens = computed.tokens[: computed.num_prompt]
        aside, transfer = self._service.aside, self._transfer
        blocks = await aside(lambda: transfer.found(table, tokens, asked.first_block))
        nbytes = transfer.nbytes(blocks)
        lease = self._leases.open(nbytes, asked.transport)
        data = lease.data
        if not nbytes or not await aside(lambda: transfer.read(blocks, data)):
            self._leases.release(lease.lease_id)
            raise ApiError(
                503,
                "the blocks of the prompt were evicted before they were fetched",
                kind="service_unavailable",
                code="blocks_evicted",
            )
        offer = self._offer(blocks, lease, await aside(lambda: checksum(data)))
        return offer, lease

    def _offer(self, blocks: BlockRange, lease: Lease, crc: int) -> Json:
        return {
            "lease": lease.lease_id,
            "seconds": self._leases.seconds,
            "first_block": blocks.first,
            "blocks": blocks.count,
            "last_key": blocks.last_key,
            "bytes": lease.nbytes,
            "crc32": crc,
            "machine": self._machine,
            **lease.place,
        }
