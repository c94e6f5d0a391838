"""What a compiled network is, as JSON beside it: for people and programs; nothing is computed from it.

target, library   what it was built for and by
gpu, version      of the full TensorRT alone: where it was built, by which version exactly
capabilities      of GPUs, from the header of the network; of the full TensorRT that of the GPU
profiles          name → length → [least, usual, most]
network           kinds of layers that the builder was given → how many
layers            profile → kinds of layers that the builder made of them → how many
activation_bytes  profile → bytes of the GPU's memory between the layers
products          profile → how many products of the graph they compute: all, or there would be no engine
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.configs.sizes import format_bytes
from ingot.errors import EngineError
from ingot.plan import Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import file_name
from ingot.plugins.tensorrt.compiler import Compiled
from ingot.plugins.tensorrt.layers import computed_products, counts
from ingot.plugins.tensorrt.plan_file import HEADER_BYTES, read_header
from ingot.plugins.tensorrt.tensors import profiles

NETWORK = ".plan"  # suffixes of the files
DESCRIPTION = ".plan.json"


def describe(graph: OpGraph, plan: Plan, words: Mapping[str, Any], compiled: Compiled) -> bytes:
    """Canonical JSON. words: target, library, capabilities, perhaps gpu and version."""
    named = profiles(plan)
    document = {
        **words,
        "profiles": {
            profile.name: {dim.value: [span.least, span.usual, span.most] for dim, span in profile.ranges.items()}
            for profile in named
        },
        "network": dict(compiled.network),
        "layers": {
            profile.name: dict(counts(layer for layer in compiled.layers if layer.profile == number))
            for number, profile in enumerate(named)
        },
        "activation_bytes": dict(zip((profile.name for profile in named), compiled.activation_bytes, strict=True)),
        "products": {
            profile.name: len(computed_products(graph, compiled.layers, number)) for number, profile in enumerate(named)
        },
    }
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def read_description(directory: Path, target: str) -> dict[str, Any] | None:
    """The description in an engine's directory, with what the header of the network says now; None: the target has
    none. Raises EngineError for a header that is none, or another one."""
    names = [(file_name(NETWORK, word), file_name(DESCRIPTION, word)) for word in (target, "")]
    found = next((pair for pair in names if (directory / pair[1]).is_file()), None)
    if found is None:
        return None
    document: dict[str, Any] = json.loads((directory / found[1]).read_text())
    if document["target"] != target:
        return None
    network = directory / found[0]
    if "gpu" in document:
        return {**document, "file": found[0], "bytes": network.stat().st_size}
    with network.open("rb") as file:
        header = read_header(file.read(HEADER_BYTES), str(network))
    said = f"{header.nbytes} bytes for GPUs of {', '.join(header.capabilities)} by {header.version}"
    nbytes, version = network.stat().st_size, str(document["library"]).split()[-1]
    built = f"{nbytes} bytes for GPUs of {', '.join(document['capabilities'])} by {version}"
    if said != built:
        raise EngineError(
            "the header of the TensorRT engine is not the one that was built",
            where=str(network),
            expected=built,
            got=said,
            hint="copy the engine again, or build the engine again",
        )
    return {
        **document,
        "file": found[0],
        "bytes": header.nbytes,
        "version": header.version,
        "mask": header.mask,
        "capabilities": list(header.capabilities),
    }


def description_lines(document: dict[str, Any]) -> list[str]:
    """For people."""
    products = "/".join(map(str, document["products"].values()))
    where = f" on {document['gpu']}," if "gpu" in document else ""
    mask = f" (mask {document['mask']:#04x})" if "mask" in document else ""
    lines = [
        f"network     {document['file']}: {format_bytes(document['bytes'])} by {document['library']}{where} for "
        f"GPUs of {', '.join(document['capabilities'])}{mask}, {products} products, "
        f"{format_bytes(max(document['activation_bytes'].values()))} for activations"
    ]
    for name, ranges in document["profiles"].items():
        spans = (f"{what} {least} to {most}" for what, (least, _, most) in ranges.items())
        kinds = (f"{count} {kind}" for kind, count in document["layers"][name].items())
        lines.append(f"profile     {name}: {', '.join(spans)}; layers: {', '.join(kinds)}")
    return lines
