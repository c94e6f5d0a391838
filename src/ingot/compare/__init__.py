"""Compares what an Engine computes with the source that it was built from. `compare.py` is the main path."""
