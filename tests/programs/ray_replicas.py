"""The application of examples/ray_serve on this machine, in a Ray of its own, until standard input ends.

python -m tests.programs.ray_replicas --port 8700 --engine / ENGINE 2 --engine /ranks ENGINE 1

Each engine is served below a path, by so many replicas of one core for each rank.
"""

import argparse
import importlib
import sys
from typing import Any


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", nargs=3, action="append", required=True, metavar=("PATH", "ENGINE", "REPLICAS"))
    given = parser.parse_args()
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")
    example: Any = importlib.import_module("app")  # the caller's PYTHONPATH has the example's directory
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    for path, engine, replicas in given.engine:
        count = int(replicas)
        arguments = example.Arguments(engine_dir=engine, min_replicas=count, max_replicas=count)
        serve.run(example.app(arguments), name=f"at{path}", route_prefix=path)
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
