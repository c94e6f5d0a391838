"""Slow, independent computations that the product is compared with."""
