"""Ways to damage a checkpoint in safetensors or GGUF: entries, numbers, bytes, settings."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
Edit = Callable[[Path, random.Random], str]
"""Spoils a directory and says how."""

ABSENT = object()
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 7, 16, 32, 64, 128, 10**5, 2**31, 2**63, 10**30, -(10**30)),
    *(0.5, 1e-45, 1e300, float("inf"), float("nan"), True, False, None, ABSENT),
    *("", "strange", "x" * 10**5, "re:(a+)+$", "gptq", "int", "float", "group", "channel", "block", "tensor"),
    *([], {}, [None], [[]], [1], [-1, 2], [128, 128], ["lm_head"], {"": 1}, {"a": {"b": {"c": []}}}),
)
SHAPES: tuple[Callable[[list[int]], Any], ...] = (
    lambda shape: shape[::-1],
    lambda shape: [*shape, 1],
    lambda shape: [1, *shape],
    lambda shape: [int(np.prod(shape))],
    lambda shape: [-size for size in shape],
    lambda shape: [2**62, *shape[1:]],
    lambda shape: [size + 1 for size in shape],
    lambda shape: [0, *shape[1:]],
    lambda shape: [float(size) for size in shape],
    lambda shape: [shape],
    lambda shape: [1] * 1000,
    lambda shape: None,
    lambda shape: "8",
)
DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "I32", "I64", "BOOL", "F8_E4M3", "F8_E8M0", "Q4_K", "", None, 7)
NUMBERS = ("nan", "inf", "zeros", "ones", "random", "sign")  # what a tensor's bytes become


# Safetensors


def _parts(path: Path) -> tuple[Config, bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _store(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_entry(folder: Path, draw: random.Random) -> str:
    """An entry of the header: type, shape, place, name."""
    header, data = _parts(folder / "model.safetensors")
    name = draw.choice([each for each in header if each != "__metadata__"])
    entry, what = header[name], draw.choice(("dtype", "shape", "data_offsets", "gone", "renamed", "copied", "entry"))
    if what == "dtype":
        before, entry["dtype"] = entry["dtype"], draw.choice(DTYPES)
        _store(folder / "model.safetensors", header, data)
        return f"{name}: dtype {before} becomes {entry['dtype']}"
    if what == "shape":
        entry["shape"] = draw.choice(SHAPES)(entry["shape"])
    elif what == "data_offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = draw.choice(
            (
                [end, begin],
                [begin, end + 1],
                [begin + 4, end + 4],
                [-4, end],
                [begin, 2**63],
                [begin],
                None,
                [0, 0],
                "ab",
            )
        )
    elif what == "gone":
        del header[name]
    elif what == "renamed":
        header[name + draw.choice(("_", ".weight", "\0", "/../x"))] = header.pop(name)
    elif what == "copied":
        header[name.replace("q_proj", "v_proj") + draw.choice(("", "2"))] = dict(entry)
    else:
        header[name] = draw.choice(HOSTILE[-20:])
        header[name] = None if header[name] is ABSENT else header[name]
    _store(folder / "model.safetensors", header, data)
    return f"{name}: {what} {header.get(name)}"


def edit_numbers(folder: Path, draw: random.Random) -> str:
    """The bytes of a tensor: NaN, infinity, or other numbers."""
    header, data = _parts(folder / "model.safetensors")
    name = draw.choice([each for each in header if "_proj" in each and not each.endswith(".bias")])
    begin, end = header[name]["data_offsets"]
    what, size = draw.choice(NUMBERS), end - begin
    made = bytearray(data)
    special = {"F32": ("<I", 0x7FC00000, 0x7F800000), "F16": ("<H", 0x7E00, 0x7C00), "BF16": ("<H", 0x7FC0, 0x7F80)}
    if what in ("nan", "inf") and header[name]["dtype"] in special:
        form, nan, infinite = special[header[name]["dtype"]]
        number = struct.pack(form, nan if what == "nan" else infinite)
        at = begin + draw.randrange(max(1, size // len(number))) * len(number)
        made[at : at + len(number)] = number[: end - at]
    elif what == "random" and header[name]["dtype"] in special:  # of other sizes, logits would overflow
        width = struct.calcsize(special[header[name]["dtype"]][0])
        numbers = [bytes(made[at : at + width]) for at in range(begin, end, width)]
        draw.shuffle(numbers)
        made[begin:end] = b"".join(numbers)
    elif what == "sign":
        made[begin:end] = bytes(each ^ 0x80 for each in made[begin:end])
    else:
        made[begin:end] = {"zeros": bytes(size), "ones": b"\xff" * size}.get(what, draw.randbytes(size))
    _store(folder / "model.safetensors", header, bytes(made))
    return f"{name} ({header[name]['dtype']}): {what}"


def edit_file(folder: Path, draw: random.Random) -> str:
    """The file as bytes: cut, lengthened, bits of its header flipped."""
    path = folder / ("model.gguf" if (folder / "model.gguf").exists() else "model.safetensors")
    raw = bytearray(path.read_bytes())
    what = draw.choice(("cut", "grown", "flipped", "length", "word"))
    at = draw.randrange(len(raw))
    if what == "cut":
        raw = raw[:at]
    elif what == "grown":
        raw += draw.randbytes(draw.choice((1, 32, 4096)))
    elif what == "flipped":
        for _ in range(draw.choice((1, 2, 8))):
            at = draw.randrange(min(len(raw), 6000))
            raw[at] ^= 1 << draw.randrange(8)
    elif what == "length":
        raw[:8] = struct.pack("<Q", draw.choice((0, 1, 8, len(raw), 2**32, 2**63, 2**64 - 1)))
    else:
        at = draw.randrange(min(len(raw) - 8, 6000))
        raw[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)))
    path.write_bytes(raw)
    return f"{path.name}: {what} at {at}"


def _places(config: Config, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from _places(value, (*at, key))


def edit_settings(folder: Path, draw: random.Random) -> str:
    """A value of quantization_config, or of a further file with it."""
    paths = [each for each in (folder / "config.json", folder / "hf_quant_config.json") if each.exists()]
    path = draw.choice(paths)
    document = json.loads(path.read_text())
    if path.name == "config.json":
        places = [("quantization_config", *each) for each in _places(document.get("quantization_config", {}))]
        places += [("quantization_config",), *(("text_config",) for _ in range(not places))]
    else:
        places = list(_places(document))
    place, value = draw.choice(places), draw.choice(HOSTILE)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is ABSENT:
        inner.pop(place[-1], None)
    else:
        inner[place[-1]] = value
    path.write_text(json.dumps(document))
    return f"{path.name}: {'.'.join(map(str, place))} = {'absent' if value is ABSENT else repr(value)[:60]}"


# GGUF


def _fields(raw: bytes) -> list[tuple[str, int, str]]:
    """(what it is, where it lies, its type) of numbers in a sound GGUF header."""
    found: list[tuple[str, int, str]] = [("version", 4, "<I"), ("tensors", 8, "<Q"), ("settings", 16, "<Q")]
    tensors, settings = struct.unpack_from("<QQ", raw, 8)
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    forms = {1: "<b", 2: "<H", 4: "<I", 8: "<Q"}
    at = 24

    def text() -> str:
        nonlocal at
        (length,) = struct.unpack_from("<Q", raw, at)
        found.append(("length of a text", at, "<Q"))
        at += 8 + length
        return raw[at - length : at].decode()

    def value(kind: int, key: str) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = struct.unpack_from("<IQ", raw, at)
            found.extend([(f"type of {key}", at, "<I"), (f"items of {key}", at + 4, "<Q")])
            at += 12
            if inner == 8:
                for _ in range(count):
                    text()
            else:
                at += count * sizes[inner]
        else:
            found.append((key, at, forms[sizes[kind]]))
            at += sizes[kind]

    for _ in range(settings):
        key = text()
        (kind,) = struct.unpack_from("<I", raw, at)
        found.append((f"type of {key}", at, "<I"))
        at += 4
        value(kind, key)
    for _ in range(tensors):
        name = text()
        (ndim,) = struct.unpack_from("<I", raw, at)
        found.append((f"dimensions of {name}", at, "<I"))
        at += 4
        for _ in range(ndim):
            found.append((f"size of {name}", at, "<Q"))
            at += 8
        found.extend([(f"type of {name}", at, "<I"), (f"offset of {name}", at + 4, "<Q")])
        at += 12
    return found


def edit_field(folder: Path, draw: random.Random) -> str:
    """A number of the header: counts, lengths, types, sizes, offsets, settings."""
    path = folder / "model.gguf"
    raw = bytearray(path.read_bytes())
    what, at, form = draw.choice(_fields(bytes(raw)))
    size = struct.calcsize(form)
    (before,) = struct.unpack_from(form, raw, at)
    value = draw.choice((0, 1, 2, 3, 7, 8, 9, 12, 31, 32, before + 1, before - 1, before * 2, 2**31, 2**62, 2**64 - 1))
    raw[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(raw)
    return f"{what} = {value}"


def edit_blocks(folder: Path, draw: random.Random) -> str:
    """Bytes among the blocks of the tensors: float16 numbers that are NaN or infinite, or any."""
    path = folder / "model.gguf"
    raw = bytearray(path.read_bytes())
    what = draw.choice(("nan", "inf", "random"))
    begin = len(raw) // 2
    at = begin + draw.randrange(len(raw) - begin - 64)
    if what == "random":
        raw[at : at + 64] = draw.randbytes(64)
    else:
        raw[at : at + 64] = struct.pack("<H", 0x7E00 if what == "nan" else 0x7C00) * 32
    path.write_bytes(raw)
    return f"bytes at {at}: {what}"


OF_SAFETENSORS: tuple[Edit, ...] = (edit_entry, edit_numbers, edit_numbers, edit_settings, edit_settings, edit_file)
OF_GGUF: tuple[Edit, ...] = (edit_field, edit_field, edit_field, edit_blocks, edit_file)
