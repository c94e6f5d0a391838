"""The command line: `ingot convert | build | run | serve | bench | inspect | verify | doctor | quickstart`.

Each command is the file of its name in this package, imported only when it is called.
"""

from ingot.cli.app import main

__all__ = ["main"]
