"""A Checkpoint as a file that other engines read."""
