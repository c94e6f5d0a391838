"""What the build gives to the process that compiles, as files in a folder: the network and the shapes of its inputs."""

import json
from pathlib import Path

from ingot.plan import Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.tensorrt.lowering import lower
from ingot.plugins.tensorrt.tensors import input_ranges

NETWORK, PROFILES = "network.onnx", "profiles.json"


def hand_over(graph: OpGraph, plan: Plan, folder: Path) -> None:
    """Write both."""
    (folder / NETWORK).write_bytes(lower(graph, plan).SerializeToString())
    (folder / PROFILES).write_text(json.dumps(input_ranges(plan)))
