"""Quantised weights whose rounding follows what a calibration text does to each product's inputs."""
