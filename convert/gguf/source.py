"""A GGUF file, or several that are parts of one, opened as if it were a Hugging Face directory."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture
from ingot.convert.gguf.architectures import find_architecture
from ingot.convert.gguf.header import GgufTensor, Header, read_gguf_header
from ingot.convert.gguf.rows import expert_name, gguf_rows, is_stack
from ingot.convert.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer
from ingot.convert.gguf.weights import as_weight, factors_of, part_of_stack
from ingot.convert.quantised.form import Quantised
from ingot.convert.weights import Row
from ingot.errors import CheckpointError, MissingModelError, UnsupportedModelError, spelled
from ingot.tensor_file import StoredTensor, read_rows

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_WEIGHT, _SCALE = ".weight", "scale"
_INPUT_SCALE = "input_scale"  # how inputs were rounded to 4 bits while the model was calibrated: nothing is made of it
_BLOCK = re.compile(r"blk\.(\d+)\.")
_STILL = 1e29  # a factor of this size stands for a pair that does not turn
_MOST_FACTORS = 1 << 16
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 1 << 16
_WITHOUT_EFFECT = ("pooling_type", "rope.scaling.attn_factor", "expert_feed_forward_length", "swin_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufSource:
    """config     as config.json would say it
    tensors    llama.cpp's name → the weight, experts one by one
    files      all parts
    drafts     tensors of layers that only draft tokens, which are left out
    choosers   tensors that only choose tokens for sparse attention, which are left out too
    """

    path: Path
    config: Section
    tensors: Mapping[str, StoredTensor | Quantised]
    files: tuple[Path, ...]
    tokenizer: GgufTokenizer
    architecture: Architecture
    stored: Mapping[str, GgufTensor]
    drafts: tuple[str, ...]
    choosers: tuple[str, ...]
    factors: tuple[float, ...]

    @property
    def beside(self) -> tuple[Path, ...]:
        """The tokenizer.json that counts where the file's own tokenizer is not converted."""
        return (self.path.parent / "tokenizer.json",) if self.tokenizer.beside else ()

    def adapted(self, model: ModelConfig) -> ModelConfig:
        """The model with what llama.cpp's converter has prepared, and with factors of its rotation."""
        model = self.architecture.adapt(model, self.stored)
        if not self.factors:
            return model
        if model.rope is None or len(self.factors) != model.rope.rotary_dim // 2:
            raise CheckpointError(
                "the number of rotary factors does not fit the size of a head",
                where=f"{self.path}: {_FACTORS[0]}",
                expected="a model without rotary positions" if model.rope is None else str(model.rope.rotary_dim // 2),
                got=f"{len(self.factors)} factors",
            )
        turning = sum(factor < _STILL for factor in self.factors)
        if turning < len(self.factors) and set(self.factors[:turning]) == {1.0}:  # the first pairs turn, as they are
            return dataclasses.replace(model, rope=dataclasses.replace(model.rope, turning_pairs=turning))
        factors = () if set(self.factors) == {1.0} else self.factors
        return dataclasses.replace(model, rope=dataclasses.replace(model.rope, factors=factors))

    def rows(self, model: ModelConfig) -> list[Row]:
        """Where each weight comes from."""
        return gguf_rows(self.architecture, model, self.tensors)


def is_gguf(path: Path) -> bool:
    """A GGUF file, or a directory whose weights are one."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}")) and not any(True for each in _WEIGHTS for _ in path.glob(each))
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GgufSource:
    """Raises CheckpointError, ConfigError or UnsupportedModelError; no weight is read."""
    headers = _headers(model_files(path))
    main = headers[0]
    where = f"{main.path}:general.architecture"
    kind = main.settings.get("general.type", "model")
    name = main.settings.get("general.architecture")
    if kind != "model" or not isinstance(name, str):
        raise UnsupportedModelError(
            "the GGUF file is not a language model",
            where=str(main.path),
            expected="general.type model",
            got=repr(kind)[:100],
        )
    architecture = find_architecture(name, where)
    stored = {key: tensor for header in headers for key, tensor in header.tensors.items()}
    tokenizer = read_gguf_tokenizer(main)
    config = _config(main, name, architecture, stored, tokenizer)
    factors = _factors(stored)
    if "short" in factors:
        config["rope_scaling"] = _longrope(main, name, config, factors)
    drafts = _drafts(main, name, stored)
    part = architecture.choosers
    choosers = tuple(key for key in stored if part and part in key and key not in drafts)
    weights = {key: each for key, each in stored.items() if key not in (*drafts, *choosers)}
    tensors = dict(_tensors(weights, architecture.scales))
    return GgufSource(
        path=main.path,
        config=Section(config, str(main.path)),
        tensors=tensors,
        drafts=drafts,
        choosers=choosers,
        files=tuple(header.path for header in headers),
        tokenizer=tokenizer,
        architecture=architecture,
        stored=stored,
        factors=factors.get("freqs", ()),
    )


def model_files(path: Path) -> list[Path]:
    """All parts of the model that a file or a directory stands for. Raises IngotError; no file is opened."""
    first = _first_file(path)
    part = _PART.fullmatch(first.name)
    paths = [first]
    if part is not None:
        count = int(part["count"])
        if not count:
            raise CheckpointError(
                "the file's name says that the model has no parts",
                where=str(path),
                expected="-00001-of-00003.gguf and the like",
                hint="give the file its own name again",
            )
        paths = [first.with_name(f"{part['name']}-{n:05d}-of-{count:05d}{SUFFIX}") for n in range(1, count + 1)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            "files of the model are missing",
            where=str(first.parent),
            expected=f"{len(paths)} files",
            got=f"{len(missing)} missing: {', '.join(missing[:10])}",
            hint="finish the download",
        )
    return paths


def _first_file(path: Path) -> Path:
    """The file, or the directory's only one; of a model in parts the first."""
    if not path.exists():
        raise MissingModelError("there is no such GGUF file", where=str(path), hint=spelled(path))
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    firsts = {}
    for file in files:
        part = _PART.fullmatch(file.name)
        first = file if part is None else file.with_name(f"{part['name']}-00001-of-{part['count']}{SUFFIX}")
        firsts[first] = True
    if len(firsts) > 1:
        raise CheckpointError(
            "the directory holds several GGUF models",
            where=str(path),
            got=", ".join(file.name for file in list(firsts)[:10]),
            hint="give one of the files as --model_dir",
        )
    return next(iter(firsts))


def _headers(paths: Sequence[Path]) -> list[Header]:
    """Headers of all parts. Their numbers must agree with the files' names and with the count in the first part."""
    headers = [read_gguf_header(path) for path in paths]
    total = sum(len(header.tensors) for header in headers)
    for number, header in enumerate(headers):
        for key, wanted in (("split.no", number), ("split.count", len(headers)), ("split.tensors.count", total)):
            found = header.settings.get(key, wanted)
            if found != wanted and not (key == "split.count" and found == 0 and len(headers) == 1):
                raise CheckpointError(
                    "the parts of the model do not fit together",
                    where=f"{header.path}:{key}",
                    expected=str(wanted),
                    got=repr(found)[:100],
                    hint="download all parts of one model again, under their own names",
                )
    seen: set[str] = set()
    for header in headers:
        if twice := seen & set(header.tensors):
            raise CheckpointError(
                "two parts of the model hold the same tensor",
                where=str(header.path),
                got=min(twice),
                hint="download all parts of one model again, under their own names",
            )
        seen |= set(header.tensors)
    return headers


def _config(
    main: Header, name: str, architecture: Architecture, stored: Mapping[str, GgufTensor], tokenizer: GgufTokenizer
) -> dict[str, object]:
    """What config.json would say. Raises ConfigError or UnsupportedModelError for settings that are not applied."""
    inner = {key[len(name) + 1 :]: value for key, value in main.settings.items() if key.startswith(f"{name}.")}
    keys = Section(inner, f"{main.path}:{name}")
    layers = keys.integer("block_count", minimum=1)
    if layers > _MOST_LAYERS:
        raise CheckpointError(
            "the model has too many layers",
            where=keys.place("block_count"),
            expected=f"at most {_MOST_LAYERS:,}",
            got=f"{layers:,}",
            hint="download the file again: its settings are damaged",
        )
    config = architecture.config(keys, stored)
    for key in _WITHOUT_EFFECT:
        keys.has(key)
    if unread := keys.unread():
        raise UnsupportedModelError(
            "the GGUF file has settings that ingot does not know, and that may change the results",
            where=keys.where,
            got=", ".join(unread)[:300],
            hint="convert the model that the file was made from",
        )
    table = stored.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(
            "the GGUF file has no token table",
            where=str(main.path),
            expected="a tensor token_embd.weight with two dimensions",
            hint="download the file again, or all its parts",
        )
    return {"vocab_size": table.shape[0], **config, **tokenizer.ids}


def _factors(stored: Mapping[str, GgufTensor]) -> dict[str, tuple[float, ...]]:
    """freqs, short, long → the divisors of the frequencies, of those that the file has."""
    found = {}
    for name in _FACTORS:
        tensor = stored.get(name)
        if tensor is None:
            continue
        if len(tensor.shape) != 1 or tensor.type.dtype != "F32" or tensor.shape[0] > _MOST_FACTORS:
            raise CheckpointError(
                "the factors of the rotary positions are not usable",
                where=f"{tensor.file}: {name}",
                expected="a vector of F32",
                got=f"{tensor.type.name} {list(tensor.shape)}",
            )
        held = as_weight(tensor, name)
        assert isinstance(held, StoredTensor), "a float is"
        values = read_rows(held).astype(np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(
                "the factors of the rotary positions are not usable",
                where=f"{tensor.file}: {name}",
                expected="numbers above 0",
            )
        found[name.removesuffix(".weight").rpartition("_")[2]] = tuple(float(value) for value in values)
    return found


def _longrope(
    main: Header, name: str, config: Mapping[str, object], factors: Mapping[str, tuple[float, ...]]
) -> dict[str, object]:
    original = main.settings.get(f"{name}.rope.scaling.original_context_length", config["max_position_embeddings"])
    scale = main.settings.get(f"{name}.rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "short_factor": list(factors["short"]),
        "long_factor": list(factors.get("long", factors["short"])),
        "original_max_position_embeddings": original,
        **({"attention_factor": scale} if scale is not None else {}),
    }


def _drafts(main: Header, name: str, stored: Mapping[str, GgufTensor]) -> tuple[str, ...]:
    """Tensors of the last layers, where these only draft tokens (multi-token prediction)."""
    count, layers = (main.settings.get(f"{name}.{key}", 0) for key in ("nextn_predict_layers", "block_count"))
    if not count or not isinstance(count, int) or not isinstance(layers, int):
        return ()
    return tuple(key for key in stored if (match := _BLOCK.match(key)) and int(match[1]) >= layers - count)


def _tensors(stored: Mapping[str, GgufTensor], kept: tuple[str, ...]) -> Iterator[tuple[str, StoredTensor | Quantised]]:
    """Under llama.cpp's names, stacks of experts as one tensor for each. Scales of whole tensors become factors.

    kept: ends of names of other scales
    """
    scaled = {name.removesuffix(_WEIGHT) for name, each in stored.items() if each.type.packing is not None}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        is_factor = base in scaled and kind in (_SCALE, _INPUT_SCALE) and not name.endswith(kept)
        if name in _FACTORS or is_factor:
            continue
        beside = f"{base}.{_SCALE}"
        scale = stored.get(beside) if base in scaled and not beside.endswith(kept) else None
        matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
        factors = factors_of(scale, matrices) if scale is not None else None
        if not is_stack(name):
            yield name, as_weight(tensor, name, factors)
            continue
        if len(tensor.shape) != 3 or tensor.shape[0] > _MOST_EXPERTS:
            raise CheckpointError(
                "a tensor of experts has a wrong shape",
                where=f"{tensor.file}: {name}",
                expected="[experts, rows, columns]",
                got=str(list(tensor.shape)),
            )
        for index in range(matrices):
            one = expert_name(name, index)
            factor = factors[index : index + 1] if factors is not None else None
            yield one, as_weight(part_of_stack(tensor, index), one, factor)
