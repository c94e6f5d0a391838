"""Model families: one table per file, found by its `model_type`."""
