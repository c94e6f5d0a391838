"""Drops the nodes whose results nobody needs for the logits."""

from ingot.builder.graph import Graph
from ingot.builder.passes.base import Sweep

PASS = Sweep(name="eliminate_dead", apply=Graph.sort)
