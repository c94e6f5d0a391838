"""Quantised checkpoints as users have them → stored codes with their scales, exactly: a file for each format."""
