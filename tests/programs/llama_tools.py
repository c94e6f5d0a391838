"""llama.cpp's own programs: llama-quantize makes GGUF files, llama-server chooses tokens."""

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.runtime.server.served import eventually

CONTEXT = 512  # tokens of a prompt and its answer

Ids = list[list[int]]
Prompt = list[int] | str


@dataclasses.dataclass(frozen=True)
class LlamaTools:
    """The folder with both programs."""

    folder: Path

    @classmethod
    def on_path(cls) -> "LlamaTools | None":
        """Those on the PATH, where both are in the same folder."""
        found = shutil.which("llama-server")
        tools = cls(Path(found).parent) if found else None
        return tools if tools and (tools.folder / "llama-quantize").is_file() else None

    def write_file(self, plain: Path, kind: str, path: Path) -> None:
        """A file of floats → one of this kind, in llama.cpp's mixture of types. Raises CalledProcessError."""
        command = [self.folder / "llama-quantize", plain, path, kind]
        subprocess.run([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def tokens(self, path: Path, prompts: Sequence[Prompt], count: int) -> Ids:
        """What the server chooses after each prompt, the likeliest token each time."""
        with self._server(path) as url:
            return [tokens_of(post(f"{url}/v1/completions", request(prompt, count)), prompt) for prompt in prompts]

    @contextlib.contextmanager
    def _server(self, path: Path) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [self.folder / "llama-server", "-m", path, "--port", port, "--host", "127.0.0.1", "--no-warmup"]
        command += ["-c", CONTEXT, "--parallel", 1, "-t", 1, "-tb", 1]
        with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            url = f"http://127.0.0.1:{port}"

            def is_ready() -> bool:
                if process.poll() is not None:
                    raise RuntimeError(f"llama-server ended with exit code {process.returncode}")
                with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/health") as answer:
                    return bool(answer.status == 200)
                return False

            try:
                if not eventually(is_ready, 600):
                    raise TimeoutError("llama-server was not ready within 600 s")
                yield url
            finally:
                process.kill()


def request(prompt: Prompt, count: int) -> dict[str, Any]:
    """The body that asks llama.cpp for so many tokens, the likeliest each time."""
    body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "n_probs": 1}
    return {**body, "ignore_eos": True, "cache_prompt": False}


def tokens_of(answer: Mapping[str, Any], prompt: Prompt) -> list[int]:
    """The tokens of an answer. Raises AssertionError if llama.cpp has read more or fewer ids than those given."""
    assert isinstance(prompt, str) or answer["usage"]["prompt_tokens"] == len(prompt), "llama.cpp adds no token to ids"
    return [int(each["id"]) for each in answer["choices"][0]["logprobs"]["content"]]


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer in JSON. Raises URLError."""
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
