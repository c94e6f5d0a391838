"""The vocabulary of models, builds and requests: frozen dataclasses and typed readers."""
