"""The quantised weights of a source: which format it is, which modules have it, and what is refused.

A module is quantised if it has the tensors of its format. The configuration is compared with that afterwards: a module
that it leaves out and that is quantised all the same is an error, and so are scales that no weight takes.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

import ingot.convert.quantised.formats as formats_package
from ingot.configs.read import Section, read_object
from ingot.convert.quantised.finite import with_finite_values
from ingot.convert.quantised.form import Quantised
from ingot.convert.quantised.module import Format, Module
from ingot.convert.quantised.patterns import is_named
from ingot.errors import CheckpointError, UnsupportedModelError
from ingot.tensor_file import StoredTensor

CONFIG_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
# Of writers that left config.json as it was: file → quant_method.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale")  # of attention: a KV cache is rounded as the engine says
_ORIGINAL = "convert the model's original weights, or a version of it in AWQ, GPTQ, FP8 or compressed-tensors"

# What ingot does not read, by quant_method: why.
REFUSED = {
    "aqlm": "AQLM's codes stand for vectors of a codebook",
    "eetq": "EETQ's int8 weights are laid out for its GPU kernels",
    "exl2": "EXL2 mixes bits within a weight",
    "exl3": "EXL3's codes stand for paths of a trellis",
    "fp_quant": "FP-Quant rotates the inputs of products by a matrix",
    "higgs": "HIGGS's codes stand for vectors of a grid, of weights that are rotated",
    "marlin": "Marlin's weights are laid out for its GPU kernels",
    "quanto": "quanto's weights are pickled tensor subclasses",
    "quark": "Quark's layouts are not known to ingot",
    "quip": "QuIP#'s codes stand for vectors of a lattice",
    "spqr": "SpQR keeps outliers in a sparse matrix",
    "vptq": "VPTQ's codes stand for vectors of a codebook",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """tensors    all that is not part of a quantised module
    quantised  "<module>.weight" → the weight
    files      of the source, beside config.json and weights, that said what it is
    """

    tensors: Mapping[str, StoredTensor]
    quantised: Mapping[str, Quantised]
    files: tuple[Path, ...] = ()


def find_formats() -> dict[str, Format]:
    """quant_method → format."""
    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(formats_package.__path__):
        module = importlib.import_module(f"{formats_package.__name__}.{info.name}")
        if (each := getattr(module, "FORMAT", None)) is not None:
            assert isinstance(each, Format), f"{info.name} defines no Format"
            found |= dict.fromkeys(each.names, each)
    return found


def settings_of(config: Section, folder: Path | None) -> Section | None:
    """What a source says of its quantisation; None where it says nothing."""
    text = config.raw("text_config")  # where some wrappers of a text model say it
    inner = [Section(text, config.place("text_config"))] if isinstance(text, dict) else []
    for section in (config, *inner):
        for key in CONFIG_KEYS:
            if section.has(key):
                values = section.raw(key)
                if not isinstance(values, dict):
                    section.section(key)  # says what is wrong
                elif values:
                    return Section(values, section.place(key))
    return None if folder is None else _beside(folder)


def _beside(folder: Path) -> Section | None:
    """What other files than config.json say."""
    if (file := folder / MODELOPT_FILE).is_file():
        values = read_object(file).get("quantization")
        if isinstance(values, dict) and values.get("quant_algo") is not None:  # not of the KV cache alone
            return Section({"quant_method": "modelopt", **values}, f"{file}:quantization")
    for name, method in _OLD_FILES.items():
        if (file := folder / name).is_file():
            return Section({"quant_method": method, **read_object(file)}, str(file))
    return None


def read_quantised(config: Section, folder: Path, tensors: Mapping[str, StoredTensor]) -> Weights:
    """The weights of an opened directory. Raises an IngotError for a format, or a variant of one, that is not read."""
    settings = settings_of(config, folder)
    if settings is None:
        return Weights(tensors=tensors, quantised={})
    name, form = _format(settings)
    found, plain = _modules(form, tensors)
    skipped = form.skipped(settings)
    quantised = {}
    for module, parts in found.items():
        if is_named(module, skipped):
            raise CheckpointError(
                "the quantization config leaves a module out whose weight is quantised",
                where=f"{settings.where}: {module}",
                got=", ".join(sorted(parts)),
                hint="correct the list of modules that are not quantised",
            )
        read = Module(name=module, format=name, parts=parts, settings=settings, bias=f"{module}.bias" in plain)
        weight = with_finite_values(form.read(read))
        _refuse_unused(form, read)
        quantised[weight.name] = weight
    _refuse_leftovers(form, plain, settings)
    extra = (folder / name for name in (MODELOPT_FILE, *_OLD_FILES))
    return Weights(tensors=plain, quantised=quantised, files=tuple(file for file in extra if file.is_file()))


def require_known_format(config: Section, folder: Path) -> None:
    """Raise UnsupportedModelError for a quantised model of a format that is not read; its weights need not be there."""
    if (settings := settings_of(config, folder)) is not None:
        _format(settings)


def refuse_quantised(config: Section) -> None:
    """Raise UnsupportedModelError for a configuration of a quantised model, whose weights are to be random."""
    if (settings := settings_of(config, None)) is not None:
        raise UnsupportedModelError(
            "--random_weights makes no quantised weights, and config.json has a quantization config",
            where=settings.where,
            hint="leave the quantization config out; build quantises: --precision w8",
        )


def _format(settings: Section) -> tuple[str, Format]:
    """Its name, and how it is read. Raises UnsupportedModelError."""
    formats = find_formats()
    if settings.has("quant_algo"):  # some of ModelOpt's files call themselves something else
        return "modelopt", formats["modelopt"]
    name = settings.text("quant_method", "")
    if not name and (settings.raw("load_in_4bit") or settings.raw("load_in_8bit")):
        name = "bitsandbytes"
    if name in formats:
        return name, formats[name]
    reason = next((why for key, why in REFUSED.items() if name.lower().startswith(key)), None)
    raise UnsupportedModelError(
        f"quantised checkpoints of quant_method {name[:40]!r} are not supported" + (f": {reason}" if reason else ""),
        where=settings.place("quant_method"),
        expected=", ".join(sorted(formats)),
        got=repr(name)[:200],
        hint=_ORIGINAL,
    )


def _modules(
    form: Format, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """Module → its tensors, of the quantised ones; and all other tensors."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    suffixes = sorted(form.parts, key=len, reverse=True)
    for name, tensor in tensors.items():
        suffix = next((each for each in suffixes if name.endswith(form.joint + each)), None)
        if suffix is not None:
            groups.setdefault(name[: -len(suffix) - 1], {})[suffix] = tensor
    found = {module: parts for module, parts in groups.items() if any(mark in parts for mark in form.marks)}
    taken = {tensor.name for parts in found.values() for tensor in parts.values()}
    taken |= {parts[each].name for parts in groups.values() for each in _CACHE if each in parts}
    return found, {name: tensor for name, tensor in tensors.items() if name not in taken}


def _refuse_unused(form: Format, module: Module) -> None:
    """Raise UnsupportedModelError where the format has a meaning for a tensor in other modules only."""
    if unused := sorted(module.parts.keys() - module.used - set(form.idle)):
        raise UnsupportedModelError(
            "a quantised module has tensors that modules of its format do not have",
            where=module.name,
            expected=", ".join(sorted(module.used)),
            got=", ".join(unused),
            hint=_ORIGINAL,
        )


def _refuse_leftovers(form: Format, plain: Mapping[str, StoredTensor], settings: Section) -> None:
    """Raise CheckpointError for codes without scales."""
    for name, tensor in plain.items():
        suffix = name.rpartition(form.joint)[2]
        if suffix in form.parts and tensor.dtype_name not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                "a quantised weight lacks its scales",
                where=f"{tensor.file}: {name}",
                expected=f"{' or '.join(form.marks)} beside it, as {settings.where} says",
                got=f"{tensor.dtype_name} {list(tensor.shape)}",
                hint="download the model again",
            )
