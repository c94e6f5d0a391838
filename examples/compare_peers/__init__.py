"""ingot and other engines on one machine, in one run, with one random-weight checkpoint: `python compare.py --help`."""
