"""A graph as JSON → an engine of the full TensorRT: the process that `full_compiler.py` starts on the target GPU.

    python -m ingot.plugins.tensorrt.compile_on_gpu FOLDER MODULE

FOLDER holds what `handover.py` wrote, options.json and perhaps timing.cache; it gets log.txt, rank0.plan,
report.json, layers.json (the layers of the engine, read back) and the new timing.cache. Exits with 1 and a line on
stderr if it fails in words.
"""

import collections
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.plugins.tensorrt.bindings import file_logger
from ingot.plugins.tensorrt.builder_bindings import Builder, Runtime
from ingot.plugins.tensorrt.configuration import configure
from ingot.plugins.tensorrt.handover import take_over
from ingot.plugins.tensorrt.lowering import lower
from ingot.plugins.tensorrt.network_api import add_network
from ingot.plugins.tensorrt.plugin import plugin_class, register_attention
from ingot.plugins.tensorrt.tensors import PROFILES

FASTEST_BUILD = 0  # optimisation level: the first tactic that works, nothing is timed


def main() -> int:
    """Exit code."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    try:
        report = compile_network(importlib.import_module(module), folder)
    except (IngotError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    (folder / "report.json").write_text(json.dumps(report))
    return 0


def compile_network(trt: Any, folder: Path) -> dict[str, Any]:
    """Kinds of layers of the network, and the engine's memory. Raises BuildError, and OSError for what the library
    refuses."""
    graph, plan = take_over(folder)
    options = json.loads((folder / "options.json").read_text())
    with (folder / "log.txt").open("w") as file:
        log = file_logger(trt, file)
        register_attention(trt)
        builder: Builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        attention = plugin_class(trt)
        add_network(trt, network, lower(graph, plan), lambda attributes: attention(attributes, None))
        layers = collections.Counter(network.get_layer(i).type.name for i in range(network.num_layers))
        config = configure(trt, builder, plan)
        if not options["timed"]:
            config.builder_optimization_level = FASTEST_BUILD
        cache = folder / "timing.cache"
        if options["timed"]:
            known = config.create_timing_cache(cache.read_bytes() if cache.is_file() else b"")
            if not config.set_timing_cache(known, ignore_mismatch=False):
                raise OSError("the timing cache is of another GPU or another TensorRT: name another file")
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise OSError("the builder made no engine")
        image = bytes(memoryview(engine))
        (folder / "rank0.plan").write_bytes(image)
        said, memory = read_back(trt, log, image, len(PROFILES))
        (folder / "layers.json").write_text(said)
        if options["timed"]:
            cache.write_bytes(memoryview(config.get_timing_cache().serialize()))
    return {"network": dict(sorted(layers.items())), "activation_bytes": memory}


def read_back(trt: Any, log: Any, image: bytes, count: int) -> tuple[str, list[int]]:
    """What the library says of the layers of an engine in all profiles, as JSON; bytes between them, by profile."""
    runtime: Runtime = trt.Runtime(log)
    engine = runtime.deserialize_cuda_engine(image)
    if engine is None:
        raise OSError("the library cannot read back the engine that it built")
    inspector = engine.create_engine_inspector()
    said = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    memory = [engine.get_device_memory_size_for_profile_v2(index) for index in range(count)]
    del inspector, engine  # each needs the one before it
    return said, memory


if __name__ == "__main__":
    sys.exit(main())
