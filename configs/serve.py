"""How an engine is served over HTTP: what `ingot serve` takes beside what `ModelRunner` takes."""

import dataclasses
import ipaddress
import logging
import re

from ingot.errors import UsageError

ROLES = ("both", "prefill", "decode")
KV_TRANSPORTS = ("auto", "nixl")
_TIMEOUTS = ("request_timeout", "body_timeout", "write_timeout", "stall_timeout", "prefill_timeout", "lease_timeout")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """host, port         where to listen; port 0 takes a free one
    model_names           names under which the engine is served; the first is its own
    api_keys              any of them opens the door; none: it is open
    chat_template         a file, "chatml", or None: what the engine carries
    tool_parser, reasoning_parser  the format in which the model writes calls, and reasoning, by name; "none"; None: as
                          the chat template has it
    special_tokens_in_content  whether what reads like a control token is one in the messages of chats, too
    skip_unsupported_tools  leave out tools of responses and messages that are not functions of the client, instead of
                          refusing them
    max_queue             sequences that may wait beside those that run; more are answered 429
    max_body_bytes        of one request
    request_timeout       seconds from the arrival of a request to its end
    body_timeout          seconds in which a request's head, and then its body, must arrive
    write_timeout         seconds that a client may leave a piece of its answer unread
    stall_timeout         seconds without a finished step after which the server is not ready
    drain_timeout         seconds that running requests get after SIGTERM
    cors_origins          origins whose pages may call the server
    log_level             what is logged, a level of the module logging
    log_requests          a line per request
    log_json              logs as JSON lines
    otlp_endpoint         where OpenTelemetry spans are sent; None: nowhere
    role                  "both"; "prefill": computes prompts for other servers alone; "decode": has prompts computed by
                          the servers of prefill_urls
    prefill_urls          of prefill servers, http://host:port
    prefill_timeout       seconds that a decode server waits for the blocks of a prompt
    prefill_min_tokens    it computes prompts itself that lack fewer tokens
    lease_timeout         seconds that a prefill server keeps blocks which nobody fetches
    lease_memory          bytes of all such blocks
    kv_transport          "auto": blocks travel through shared memory on one machine, else over HTTP; "nixl": by NIXL
    debug_hooks           offers POST /debug/stall, for tests of what watches the server
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    special_tokens_in_content: bool = False
    skip_unsupported_tools: bool = False
    max_queue: int = 256
    max_body_bytes: int = 1 << 20
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    stall_timeout: float = 4.0
    drain_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    log_level: int = logging.INFO
    log_requests: bool = True
    log_json: bool = False
    otlp_endpoint: str | None = None
    role: str = "both"
    prefill_urls: tuple[str, ...] = ()
    prefill_timeout: float = 30.0
    prefill_min_tokens: int = 256
    lease_timeout: float = 30.0
    lease_memory: int = 1 << 30
    kv_transport: str = "auto"
    debug_hooks: bool = False

    def __post_init__(self) -> None:
        for name in _TIMEOUTS:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be a number of seconds, more than 0", got=repr(getattr(self, name)))
        if not self.drain_timeout >= 0:
            raise UsageError("drain_timeout must be a number of seconds, at least 0", got=repr(self.drain_timeout))
        self._check_role()
        if any(not key.strip() or key != key.strip() for key in self.api_keys):
            raise UsageError(
                "an API key is empty or has spaces around it",
                where="--api_key or --api_key_file",
                hint="give each key without spaces, as clients send it",
            )
        if any(re.search(r"[\x00-\x1f\x7f]", key) for key in self.api_keys):
            raise UsageError(
                "an API key has control characters, which no HTTP header can carry",
                where="--api_key or --api_key_file",
                hint="use letters, digits and signs",
            )
        for origin in self.cors_origins:
            _check_origin(origin)
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise UsageError("the OTLP endpoint is not a URL", expected="http://collector:4318", got=self.otlp_endpoint)
        for name in self.model_names:
            if not name.strip() or name != name.strip():
                raise UsageError(
                    "a name in --served_model_name is empty or has spaces around it",
                    got=repr(name)[:100],
                    hint="write the names with commas and without spaces: a,b",
                )
        if len(set(self.model_names)) < len(self.model_names):
            raise UsageError(
                "a name in --served_model_name is given twice",
                got=", ".join(self.model_names),
                hint="give each name once",
            )

    def _check_role(self) -> None:
        if self.role not in ROLES:
            raise UsageError("there is no such role", where="--role", expected=", ".join(ROLES), got=self.role)
        if (self.role == "decode") != bool(self.prefill_urls):
            raise UsageError(
                "--role decode and --prefill_url go together",
                got=f"--role {self.role}, {len(self.prefill_urls)} URLs",
                hint="ingot serve --role decode --prefill_url http://host:8000",
            )
        if self.kv_transport not in KV_TRANSPORTS:
            raise UsageError(
                "there is no such transport",
                where="--kv_transport",
                expected=", ".join(KV_TRANSPORTS),
                got=self.kv_transport,
            )
        if self.role == "both" and self.kv_transport != "auto":
            raise UsageError(
                "--kv_transport needs another server",
                got=f"--role {self.role} --kv_transport {self.kv_transport}",
                hint="leave --kv_transport out, or give --role prefill or --role decode",
            )
        for url in self.prefill_urls:
            if not re.fullmatch(r"http://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?", url):
                raise UsageError("the URL of a prefill server has another form", expected="http://host:8000", got=url)

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach the address."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def _check_origin(origin: str) -> None:
    """Refuse what no browser sends as the Origin of a page: such a page could never call."""
    scheme, _, place = origin.partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme)
    sent = re.fullmatch(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", origin)
    if origin in ("*", "null") or (sent and not (default_port and place.endswith(default_port))):
        return
    raise UsageError(
        "the CORS origin has a form that browsers never send",
        where="--cors_origin",
        expected="* or scheme://host[:port] in lower case, without a path and without the port that the scheme implies",
        got=repr(origin),
        hint="e.g. https://chat.example or http://localhost:3000",
    )
