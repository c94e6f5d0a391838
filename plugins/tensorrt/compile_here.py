"""A graph as JSON → a TensorRT engine: the process that `compiler.py` starts, since the parser ends its own on a fault.

    python -m ingot.plugins.tensorrt.compile_here FOLDER MODULE CAPABILITIES

FOLDER holds what `handover.py` wrote; it gets log.txt, rank0.plan and report.json. CAPABILITIES: "SM89", several
joined by commas, or nothing for those that the library builds for by itself. Exits with 1 and a line on stderr if it
fails in words.
"""

import collections
import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.plugins.tensorrt.bindings import file_logger
from ingot.plugins.tensorrt.configuration import configure
from ingot.plugins.tensorrt.handover import take_over
from ingot.plugins.tensorrt.lowering import lower
from ingot.plugins.tensorrt.plugin import register_attention

PARSER_OPENS = "libtensorrt_rtx.so"  # by this name, and ends the process where it is not found


def main() -> int:
    """Exit code."""
    folder, module, capabilities = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    try:
        report = _compile(folder, importlib.import_module(module), [name for name in capabilities.split(",") if name])
    except (IngotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    (folder / "report.json").write_text(json.dumps(report))
    return 0


def _compile(folder: Path, trt: Any, capabilities: list[str]) -> dict[str, Any]:
    ctypes.CDLL(PARSER_OPENS)  # an OSError here is better than the parser's way to say so
    graph, plan = take_over(folder)
    with (folder / "log.txt").open("w") as file:
        log = file_logger(trt, file)
        register_attention(trt)
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if not parser.parse(lower(graph, plan).SerializeToString()):
            errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise OSError("TensorRT cannot read the exported ONNX network: " + "; ".join(errors))
        layers = collections.Counter(network.get_layer(i).type.name for i in range(network.num_layers))
        config: Any = configure(trt, builder, plan)
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
            for index, name in enumerate(capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise OSError("the builder made no engine")
    (folder / "rank0.plan").write_bytes(memoryview(engine))
    return {"network": dict(sorted(layers.items()))}


if __name__ == "__main__":
    sys.exit(main())
