"""Replicas of `ingot serve` behind Ray Serve, which places them, adds and removes some, and replaces those that fail.

pip install 'ray[serve]' httpx
cd examples/ray_serve && serve run --working-dir . app:app engine_dir=/srv/engine cores=8 max_replicas=4
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable

import httpx
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ingot.engine import read_manifest

OF_ONE_CONNECTION = ("host", "connection", "content-length", "transfer-encoding")


class Arguments(BaseModel):
    """engine_dir: the same on every machine; cores: of each rank; options: more words for `ingot serve`.

    Ray adds a replica after batches were full for upscale_delay_s seconds, and removes one that was not needed for
    downscale_delay_s.
    """

    engine_dir: str
    cores: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600
    options: str = ""


@serve.deployment(health_check_period_s=5, health_check_timeout_s=10, graceful_shutdown_timeout_s=60)
class Replica:
    """One `ingot serve`, which starts the other ranks of its engine, and all requests that Ray sends to it."""

    def __init__(self, words: list[str]) -> None:
        # Where Ray kills this process, the system sends the server SIGTERM.
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "ingot", "serve", "--port", "0", *words]
        self.server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        url = next(filter(None, map(url_of, logged(self.server.stderr or ()))), None)
        if url is None:
            raise RuntimeError(f"ingot serve ended with exit code {self.server.wait()}; its log says why")
        threading.Thread(target=lambda: list(logged(self.server.stderr or ())), daemon=True).start()
        self.closing = False
        threading.Thread(target=self.end_with_server, daemon=True).start()
        self.client = httpx.AsyncClient(base_url=url, timeout=None)  # the server has limits of its own

    async def __call__(self, request: Request) -> Response:
        """The answer as it comes. If the client leaves, so does this request, and the server computes no more of it."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))  # without Ray's --route-prefix
        url = httpx.URL(path=path, query=request.url.query.encode())
        headers = [(key, value) for key, value in request.headers.items() if key not in OF_ONE_CONNECTION]
        sent = self.client.build_request(request.method, url, headers=headers, content=await request.body())
        try:
            answer = await self.client.send(sent, stream=True)
        except httpx.TransportError as error:  # clients of OpenAI try again, on another replica
            return Response(f"this replica has lost its server: {error!r}", 503)
        kept = {key: value for key, value in answer.headers.items() if key not in OF_ONE_CONNECTION}
        return StreamingResponse(parts(answer), answer.status_code, kept)

    async def check_health(self) -> None:
        """After three failures in a row Ray replaces the replica: a rank is lost, or no step has ended for 15 s."""
        (await self.client.get("/health", timeout=5)).raise_for_status()

    def end_with_server(self) -> None:
        """End this process soon after its server: Ray sends nothing to a replica that has died, and replaces it."""
        code = self.server.wait()
        time.sleep(1)  # for the answers that begin or end with an error
        if not self.closing:
            print(f"ingot serve ended with exit code {code}; so does this replica", file=sys.stderr, flush=True)
            os._exit(1)

    def __del__(self) -> None:
        """Ray waits for running requests before it ends a replica."""
        self.closing = True
        self.server.terminate()
        self.server.wait()


async def parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body of an answer."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def logged(lines: Iterable[str]) -> Iterable[str]:
    """These lines, which also go to the log of the replica."""
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        yield line


def url_of(line: str) -> str | None:
    """Where the server listens, from the line that says so."""
    found = re.search(r"^serving .* at (http://\S+)", line)
    return found[1] if found else None


def app(given: Arguments) -> serve.Application:
    """Each replica has one bundle with the cores of all its ranks, so that these share a machine, and its memory."""
    manifest = read_manifest(given.engine_dir)
    cpus, batch = given.cores * manifest.ranks, manifest.limits.max_batch_size
    deployment = Replica.options(
        ray_actor_options={"num_cpus": cpus},
        placement_group_bundles=[{"CPU": cpus}],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=2 * batch,
        autoscaling_config={
            "min_replicas": given.min_replicas,
            "max_replicas": given.max_replicas,
            "target_ongoing_requests": batch,  # Ray adds a replica when the batches of all are full
            "upscale_delay_s": given.upscale_delay_s,
            "downscale_delay_s": given.downscale_delay_s,
        },
    )
    words = ["--engine_dir", given.engine_dir, "--threads", str(given.cores), *given.options.split()]
    return deployment.bind(words)
