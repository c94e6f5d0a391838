"""Checkpoint in, Engine out."""
