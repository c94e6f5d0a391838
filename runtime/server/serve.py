"""`ingot serve`: an engine directory → a listening server, until a signal ends it."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ingot.configs.generation import read_generation_defaults
from ingot.configs.serve import ServeConfig
from ingot.errors import IngotError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.server.http_server import HttpServer
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.service import Service
from ingot.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger("ingot.server")
_CLOSING = 10.0  # seconds for the last step to end


def serve(
    engine_dir: Path,
    open_runner: Callable[[], ModelRunner],
    config: ServeConfig,
    warn: Callable[[str], None],
    on_start: Callable[[str, int], None],
) -> int:
    """Serve until a signal; the exit code. Raises IngotError before it listens. on_start: gets host and port."""
    with contextlib.ExitStack() as closing:
        runner = closing.enter_context(open_runner())
        tokenizer = Tokenizer.from_dir(engine_dir)
        templates = ChatTemplates.from_dir(engine_dir, config.chat_template)
        if not config.special_tokens_in_content:
            templates.check(tokenizer)
        formats = AnswerFormats.find(templates.texts.values(), tokenizer, config.tool_parser, config.reasoning_parser)
        defaults = read_generation_defaults(engine_dir)
        closing.pop_all()  # from here on the service closes the runner
    if templates.built_in and config.chat_template is None:
        warn(
            "the engine has no chat template: chats use ChatML, which the model may not know; give the model's "
            "own with --chat_template FILE"
        )
    for setting in defaults.not_followed:
        warn(f"generation_config.json: ingot does not apply {setting}; this setting is ignored")
    if config.is_public and not config.api_keys:
        warn(f"anybody who reaches {config.host} may use the engine: no --api_key is set")
    set_up_logs(config.log_level, as_json=config.log_json)

    async def run() -> int:
        service = Service(runner, tokenizer, templates, formats, defaults, config, Metrics())
        server = HttpServer(service, on_start)
        gc.collect()
        gc.freeze()  # what lives as long as the server need not be looked through while everybody waits
        unable = _UnableToListen()
        logging.getLogger("uvicorn.error").addFilter(unable)
        try:
            await server.serve()
        except SystemExit:  # uvicorn's way to end when it cannot listen
            raise IngotError(
                "the server cannot listen",
                where=f"{config.host}:{config.port}",
                got=unable.reason,
                hint="choose another --host or --port",
            ) from None
        finally:
            gc.unfreeze()
            _close(service)
        return server.exit_code

    return asyncio.run(run())


def _close(service: Service) -> None:
    """A step that never ends must not keep the process."""
    closing = threading.Thread(target=service.close, daemon=True)
    closing.start()
    closing.join(_CLOSING)
    if closing.is_alive():
        _LOG.error("a step did not end within %g s of closing; the process ends without it, with exit code 1", _CLOSING)
        os._exit(1)


class _UnableToListen(logging.Filter):
    """Keeps uvicorn's words about an address out of the log: the error says them."""

    reason: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if isinstance(record.msg, OSError):
            named = isinstance(record.msg, socket.gaierror)  # its numbers are not those of the system
            self.reason = "no such host name" if named else os.strerror(record.msg.errno or 0).lower()
            return False
        return True


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        document = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


class _Words(logging.Formatter):
    """One line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        extras = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        text = f"{record.levelname.lower()}: {record.getMessage()}" + (f" {extras}" if extras else "")
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


_KNOWN = (*vars(logging.makeLogRecord({})), "message", "asctime", "color_message")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _KNOWN}


def set_up_logs(level: int, *, as_json: bool) -> None:
    """Ours from `level` on; of other packages what goes wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if as_json else _Words())
    logging.getLogger().handlers = [handler]
    for name, least in (("", logging.WARNING), ("ingot", level), ("uvicorn.error", logging.ERROR)):
        logging.getLogger(name).setLevel(least)
