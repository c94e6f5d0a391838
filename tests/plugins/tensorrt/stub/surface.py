"""Prints what the bindings of TensorRT offer, as JSON: python surface.py < [["IBuilderConfig", "clear_flag"], ...]

Gives for each path its documentation, null where there is no such thing. The process must find the libraries that the
bindings name.
"""

import functools
import importlib
import json
import sys

bindings = importlib.import_module("tensorrt_bindings")
found: list[str | None] = []
for path in json.load(sys.stdin):
    try:
        found.append(functools.reduce(getattr, path, bindings).__doc__ or "")
    except AttributeError:
        found.append(None)
print(json.dumps({"version": bindings.__version__, "found": found}))
