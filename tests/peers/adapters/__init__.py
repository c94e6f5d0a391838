"""One file per engine. Each runs as a process in that engine's environment and prints one JSON object."""
