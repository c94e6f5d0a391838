"""A network through the network API of TensorRT-RTX's real builder: python rtx_network_api.py FOLDER

Its Python network takes no plugins, so native layers of the same types and shapes stand where attention would be: all
other layers are accepted and compiled as they are. FOLDER holds what a build hands over to the process that compiles.
Prints the bytes of the engine, and what the builder said.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.plugins.tensorrt.attention import Attention
from ingot.plugins.tensorrt.bindings import logger
from ingot.plugins.tensorrt.configuration import configure
from ingot.plugins.tensorrt.handover import take_over
from ingot.plugins.tensorrt.lowering import lower
from ingot.plugins.tensorrt.network_api import add_network


class _Outputs:
    name = ""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class _WithStandIns:
    """A network whose add_plugin_v3 adds native layers."""

    def __init__(self, trt: Any, network: Any) -> None:
        self._trt, self._network = trt, network
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin_v3(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], plugin: Attention) -> _Outputs:
        network, (qkv, keys, values, *_) = self._network, inputs
        self._kept.append(np.array([plugin.heads * plugin.head_dim], np.int64))
        width = network.add_constant((1,), self._trt.Weights(self._kept[-1])).get_output(0)
        rows = network.add_slice(network.add_shape(qkv).get_output(0), (0,), (1,), (1,)).get_output(0)
        queries = network.add_slice(qkv, (0, 0), (0, 0), (1, 1))
        queries.set_input(2, network.add_concatenation([rows, width]).get_output(0))
        y = network.add_cast(queries.get_output(0), keys.dtype if plugin.narrow else self._trt.float32).get_output(0)
        return _Outputs([y, *(network.add_identity(pool).get_output(0) for pool in (keys, values))])


def main() -> None:
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    graph, plan = take_over(Path(sys.argv[1]))
    errors: list[str] = []
    log: list[str] = []

    def add(severity: str, said: str) -> None:
        (errors if "ERROR" in severity else log).append(said)

    builder = trt.Builder(logger(trt, add))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    with_stand_ins: Any = _WithStandIns(trt, network)
    add_network(trt, with_stand_ins, lower(graph, plan), lambda attention: attention)
    config: Any = configure(trt, builder, plan)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    names = [network.get_layer(index).name for index in range(network.num_layers)]
    size = engine.nbytes if engine else 0
    print(json.dumps({"bytes": size, "errors": errors, "names": names, "log": "\n".join(log)}))


main()
