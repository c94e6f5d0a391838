"""The way of `input_ids`: what reads them in the graph after each pass, which steps of the Plan do, and which modules
hand them to a session.

python -m tests.programs.trace_input_ids [--model_dir MODEL]
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ingot.builder.build import build
from ingot.builder.graph import Graph
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.quickstart import SHIPPED
from ingot.runtime.model_runner import ModelRunner
from tests.programs.traced import Stages, table, traced

NAME = "input_ids"
STAGES = {
    ("runtime.step_batch", "assemble"): "step: make the arrays of a batch",
    ("plugins.cpu.session", "run"): "session: pass the arrays to C++",
}


def readers(graph: Graph) -> str:
    """Ops that take the ids as an input, in the order of the graph."""
    ops = [node.op for node in graph.nodes if any(each is graph.ids for each in node.inputs)]
    return ", ".join(f"{op} x {ops.count(op)}" if ops.count(op) > 1 else op for op in dict.fromkeys(ops))


def changes(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """(pass, readers), for each pass after which others read the ids than before."""
    graph = Graph.load(Checkpoint.open(checkpoint).graph_path)
    yield "graph of the Checkpoint", (seen := readers(graph))
    for each in structure_passes():
        run_passes(graph, [each])
        if (now := readers(graph)) != seen:
            seen = now
            yield f"after `{each.name}`", now


def main() -> None:
    """For the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, default=SHIPPED)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, engine = Path(folder, "checkpoint"), Path(folder, "engine")
        convert(ConvertOptions(model_dir=options.model_dir, output_dir=checkpoint))
        rows = list(changes(checkpoint))
        build(BuildConfig(target="cpu"), checkpoint, engine)
        steps = [step.op for step in read_plan(engine).steps if NAME in step.inputs]
        rows.append(("Plan", ", ".join(f"`{op}`" for op in dict.fromkeys(steps))))
        with traced(Stages(STAGES)) as found, ModelRunner.from_dir(engine) as runner:
            runner.generate([[1, 2, 3]], max_new_tokens=2)
    print(
        "| stage | nodes that read `input_ids` |",
        "|---|---|",
        *(f"| {where} | {what} |" for where, what in rows),
        sep="\n",
    )
    print("", *table(found.modules), sep="\n")


if __name__ == "__main__":
    main()
