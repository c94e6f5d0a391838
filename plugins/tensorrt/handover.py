"""What a build gives to the process that compiles, as files in a folder: the graph, and the plan that sessions use.

Only that process reads ONNX: other commands that look up a target do not wait for the import.
"""

import json
from pathlib import Path

from ingot.configs.exact import read_exactly
from ingot.configs.read import write_record
from ingot.errors import BuildError
from ingot.plan import Plan
from ingot.plan_json import plan_from_json
from ingot.plugins.op_graph import OpGraph

_GRAPH, _PLAN = "graph.json", "plan.json"


def hand_over(graph: OpGraph, plan: Plan, folder: Path) -> None:
    """Write both."""
    (folder / _GRAPH).write_text(json.dumps(write_record(graph)))
    (folder / _PLAN).write_text(plan.to_json())


def take_over(folder: Path) -> tuple[OpGraph, Plan]:
    """Read both."""
    graph = read_exactly(
        OpGraph,
        json.loads((folder / _GRAPH).read_text()),
        what="the graph to compile cannot be read",
        where=_GRAPH,
        error=BuildError,
        hint="build the engine again",
    )
    return graph, plan_from_json((folder / _PLAN).read_text())
