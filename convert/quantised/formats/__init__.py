"""A file for each format of quantised checkpoints, found by the name of its file."""
