"""The ASGI application: routes, what stands before them, and what is told when they fail."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ingot.runtime.server.absent_routes import ABSENT
from ingot.runtime.server.api_error import ApiError, ClientGoneError
from ingot.runtime.server.app import Api
from ingot.runtime.server.messages_format import anthropic_error
from ingot.runtime.server.middleware import RequestGuard
from ingot.runtime.server.service import Service


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    config = service.config
    middleware = [Middleware(RequestGuard, api_keys=config.api_keys, log=service.log, origins=config.cors_origins)]
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Session-Id", "Retry-After", "X-Should-Retry"],
        )
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        ClientGoneError: _client_gone,
        HTTPException: _http_error,
        Exception: _our_fault,
    }
    app = Starlette(routes=Api(service).routes(), middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to where the client's Host header says
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    request.state.outcome = error.code or error.kind
    body = anthropic_error(error) if request.scope["path"].startswith("/v1/messages") else error.body()
    return JSONResponse(body, error.status, error.headers)


async def _client_gone(request: Request, error: ClientGoneError) -> Response:
    request.state.outcome = "client gone"
    return Response(status_code=499)


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]  # not request.url: the client's Host header is part of that
    first = path.removeprefix("/v1").strip("/").split("/")[0]
    if error.status_code == 404 and path.endswith("/") and _is_route(request, path.rstrip("/")):
        message, code = f"{path[:200]}: the path has no slash at its end", "unknown_url"
    elif error.status_code == 404 and first in ABSENT:
        message, code = f"{path}: {ABSENT[first]}", "unsupported_endpoint"
    elif error.status_code == 404:
        message, code = f"there is no {path[:200]}; /openapi.json lists what there is", "unknown_url"
    else:
        message, code = f"{request.method} {path[:200]}: {error.detail}", None
    found = ApiError(error.status_code, message, code=code, headers=error.headers)
    return JSONResponse(found.body(), error.status_code, found.headers)


def _is_route(request: Request, path: str) -> bool:
    return any(isinstance(each, Route) and each.path == path for each in request.app.routes)


async def _our_fault(request: Request, error: Exception) -> Response:
    headers = {"x-should-retry": "false", "x-request-id": request.state.caller.request_id}  # the guard has been left
    found = ApiError(500, "the server made a mistake; its log says which", kind="server_error", headers=headers)
    return JSONResponse(found.body(), 500, found.headers)
