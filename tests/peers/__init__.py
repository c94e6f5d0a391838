"""ingot and other engines on one machine, in one run, from one random checkpoint: `python -m tests.peers --help`."""
