"""Hugging Face directory or GGUF file → Engine in a cache directory, built once per source and options.

<cache>/ingot/engines/<key>/    key: SHA-256 of the source's files, the build's options and ingot's version
"""

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ingot import __version__
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.source import is_gguf, model_files
from ingot.engine import is_engine, open_engine
from ingot.errors import EngineError, IngotError, UsageError
from ingot.plugins.registry import find_targets

_READ_WHOLE = 1 << 20  # larger files are known by size and time of change


def default_cache() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) if home else Path.home() / ".cache"


def cached_engine(model_dir: Path, config: BuildConfig, cache_dir: Path | None, say: Callable[[str], None]) -> Path:
    """The engine of a model; builds it where it is not there or damaged. `say` gets one line per step."""
    try:
        return _cached(model_dir, config, cache_dir or default_cache(), say)
    except OSError as error:
        raise IngotError(
            "a file cannot be read or written",
            where=str(error.filename),
            got=error.strerror or str(error),
            hint="look at its permissions; cache_dir says where engines are kept",
        ) from error


def _cached(model_dir: Path, config: BuildConfig, cache: Path, say: Callable[[str], None]) -> Path:
    if not (is_gguf(model_dir) or (model_dir / "config.json").is_file()):
        raise UsageError(
            "the model is neither an Engine nor a Hugging Face directory nor a GGUF file",
            where=str(model_dir),
            expected="a directory with config.json, or a file .gguf",
            hint="download the model, or give an engine directory",
        )
    engine = cache / "ingot" / "engines" / cache_key(model_dir, config)
    if _usable(engine):
        say(f"using the engine in {engine}, which was built from {model_dir}")
        return engine
    say(f"building an engine from {model_dir}; later calls use it again from {engine}")
    engine.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=engine.parent, prefix=".checkpoint-") as work:
        checkpoint = Path(work) / "checkpoint"
        convert(ConvertOptions(model_dir=model_dir, output_dir=checkpoint))
        report = build(config, checkpoint, engine)
    for note in (*report.lowered, *report.notes):
        say(note)
    kinds = ", ".join(f"{each.target} in {each.precision}" for each in report.targets)
    say(f"built the engine for {kinds} in {report.seconds:.1f} s")
    return engine


def cache_key(model_dir: Path, config: BuildConfig) -> str:
    """Changes with every file of the source, every option, the machine's kind and the version of ingot."""
    names = ",".join(target.name for target in find_targets(config.target))
    digest = hashlib.sha256(f"{__version__} {names} {dataclasses.asdict(config)}".encode())
    for path in sorted(path for path in _files_of(model_dir) if path.is_file()):
        status = path.stat()
        digest.update(f"\n{path.name} {status.st_size} ".encode())
        digest.update(path.read_bytes() if status.st_size <= _READ_WHOLE else str(status.st_mtime_ns).encode())
    return digest.hexdigest()[:32]


def _files_of(source: Path) -> list[Path]:
    """What an engine may depend on. Beside a GGUF file other models may lie, and a tokenizer that it needs."""
    if source.is_dir():
        return list(source.iterdir())
    return [*model_files(source), source.parent / "tokenizer.json"]


def _usable(engine: Path) -> bool:
    if not is_engine(engine):
        return False
    try:
        open_engine(engine).close()
    except EngineError:
        return False
    return True
