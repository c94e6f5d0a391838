"""The application of examples/ray_serve in a Ray of its own, with two nodes on this machine, until standard input ends.

python -m tests.programs.ray_replicas --port 8700 --engine / ENGINE 2 2 --engine /ranks ENGINE 1 1

Each engine is served below a path, by at least and at most so many replicas, of one core for each rank. Once all are
ready, the program prints a line for each replica: its path, the cores of each of its bundles, and their nodes.
"""

import argparse
import importlib
import json
import sys
from typing import Any

CORES = 4  # of each node, as Ray is told: Ray only counts what replicas ask for


def placed(ray: Any) -> list[tuple[str, list[float], list[str]]]:
    """Of each replica its path, the cores of its bundles, and their nodes, from Ray's table."""
    found = []
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            path = group["name"].split("#")[0].removeprefix("SERVE_REPLICA::at")
            cores = [bundle["CPU"] for bundle in group["bundles"].values()]
            found.append((path, cores, list(group["bundles_to_node_id"].values())))
    return sorted(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    words = ("PATH", "ENGINE", "LEAST", "MOST")
    parser.add_argument("--engine", nargs=4, action="append", required=True, metavar=words)
    given = parser.parse_args()
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")
    nodes: Any = importlib.import_module("ray.cluster_utils")
    example: Any = importlib.import_module("app")  # the caller's PYTHONPATH has the example's directory
    cluster = nodes.Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False})
    cluster.add_node(num_cpus=CORES)
    ray.init(address=cluster.address, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    for path, engine, least, most in given.engine:
        arguments = example.Arguments(
            engine_dir=engine, min_replicas=least, max_replicas=most, upscale_delay_s=1, downscale_delay_s=5
        )
        serve.run(example.app(arguments), name=f"at{path}", route_prefix=path)
    for each in placed(ray):
        print(json.dumps(each))
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
