"""The OpenAPI document of the server, from the types that requests are read with."""

from typing import Any

from ingot import __version__
from ingot.runtime.server.messages_protocol import CountTokensRequest, MessagesRequest
from ingot.runtime.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefillRequest,
    StallRequest,
    TokenizeRequest,
)
from ingot.runtime.server.responses_protocol import ResponsesRequest

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_BYTES = "application/octet-stream"
_EVENTS = "text/event-stream"
_OBJECT: Json = {"type": "object"}
_ANSWER: Json = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": "object"},
    },
}
_WORDS = {
    "400": "A field is wrong, unknown or refused.",
    "401": "The API key is missing or wrong.",
    "404": "The model, or what was asked for, is not there.",
    "408": "The body, or the end of the request, did not come in time.",
    "409": "The servers have different engines.",
    "413": "The body is too large.",
    "429": "The queue is full; see Retry-After.",
    "499": "The request was cancelled.",
    "500": "The engine failed.",
    "503": "Shutting down, or not ready; see Retry-After.",
}
_GENERATING = ("400", "401", "404", "408", "413", "429", "499", "500", "503")
_READING = ("400", "401", "404", "408", "413")


def document(*, debug_hooks: bool = False, prefill: bool = False) -> Json:
    """OpenAPI 3.1."""
    schemas: Json = {"Error": _ERROR}
    paths: Json = {
        "/v1/chat/completions": _post(
            "Continue a conversation.", ChatRequest, schemas, _GENERATING, stream=True, form=_ANSWER
        ),
        "/v1/completions": _post("Continue texts.", CompletionRequest, schemas, _GENERATING, stream=True, form=_ANSWER),
        "/v1/responses": _post("Continue a conversation.", ResponsesRequest, schemas, _GENERATING, stream=True),
        "/v1/messages": _post("Continue a conversation.", MessagesRequest, schemas, _GENERATING, stream=True),
        "/v1/messages/count_tokens": _post("Count the tokens of a prompt.", CountTokensRequest, schemas, _READING),
        "/v1/models": _get("The model that is served.", ("401",)),
        "/v1/models/{model}": _get("One model.", ("401", "404"), parameter="model"),
        "/v1/requests/{request_id}/cancel": _cancel(),
        "/tokenize": _post("Text, or messages, to token ids.", TokenizeRequest, schemas, _READING),
        "/detokenize": _post("Token ids to text.", DetokenizeRequest, schemas, _READING),
        "/kv/events": _get("Blocks that the prefix cache has, gets and loses.", ("400", "401", "429"), media=_EVENTS),
        "/metrics": _get("Prometheus metrics.", (), media="text/plain"),
        "/health": _get("As /health/ready.", ("503",)),
        "/health/live": _get("The server answers.", ()),
        "/health/ready": _get("Tokens flow, and new requests are welcome.", ("503",)),
        "/": _get("A page to chat with the engine.", (), media="text/html"),
        "/version": _get("Version of ingot, and facts of the engine.", ()),
    }
    if debug_hooks:
        paths["/debug/stall"] = _post("The next step takes long.", StallRequest, schemas, _GENERATING, status="202")
    if prefill:
        errors = (*_GENERATING, "409")
        paths["/kv/prefill"] = _post("Compute a prompt, and lease its KV blocks.", PrefillRequest, schemas, errors)
        fetch = _get("The bytes of leased KV blocks.", ("401", "404"), parameter="lease_id", media=_BYTES)
        drop = _get("Give leased KV blocks back.", ("401", "404"), parameter="lease_id")
        paths["/kv/leases/{lease_id}"] = {**fetch, "delete": drop["get"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingot", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{"key": []}, {"header": []}, {}],
    }


def _post(
    words: str,
    kind: type[Body],
    schemas: Json,
    errors: tuple[str, ...],
    *,
    stream: bool = False,
    status: str = "200",
    form: Json = _OBJECT,
) -> Json:
    schema = kind.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    answer: Json = {"application/json": {"schema": form}}
    if stream:
        answer["text/event-stream"] = {}
    body = {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}
    return {
        "post": {
            "summary": words,
            "requestBody": {"required": True, "content": body},
            "responses": {status: {"description": words, "content": answer}, **_errors(errors)},
        }
    }


def _get(words: str, errors: tuple[str, ...], *, parameter: str | None = None, media: str = "application/json") -> Json:
    schema = _OBJECT if media == "application/json" else {"type": "string"}
    operation: Json = {
        "summary": words,
        "responses": {"200": {"description": words, "content": {media: {"schema": schema}}}, **_errors(errors)},
    }
    if "503" in errors:
        operation["responses"]["503"]["content"] = {"application/json": {"schema": _OBJECT}}
    if parameter is not None:
        operation["parameters"] = [_path_parameter(parameter)]
    return {"get": operation}


def _cancel() -> Json:
    words = "Cancel a request by the id of its answer, or by its X-Request-Id."
    answer = {"200": {"description": words, "content": {"application/json": {"schema": _OBJECT}}}}
    return {
        "post": {
            "summary": words,
            "parameters": [_path_parameter("request_id")],
            "responses": {**answer, **_errors(("401", "404"))},
        }
    }


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _errors(codes: tuple[str, ...]) -> Json:
    schema = {"$ref": _REF.format(model="Error")}
    return {code: {"description": _WORDS[code], "content": {"application/json": {"schema": schema}}} for code in codes}
