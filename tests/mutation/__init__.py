"""Faults that tests must notice: `python -m tests.mutation`. `faults.toml` has the list, `run.py` plants them."""
