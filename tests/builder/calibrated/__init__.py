"""Calibrated quantisation."""
