"""Graph passes: one file each, ordered by `pipeline.py`."""
