"""`python -m ingot` is the command `ingot`."""

from ingot.cli import main

main()
