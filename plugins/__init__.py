"""Ops, their references, and the targets that compute them."""
