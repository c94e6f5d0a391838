"""How fast an Engine is on this machine, and how near that is to what the machine can do."""
