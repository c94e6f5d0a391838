"""Whether GPU engines do on a real GPU what they do on an emulated one, and how fast; results as JSON."""
