"""Advice on precisions."""
