"""Hugging Face directory in, Checkpoint out."""
