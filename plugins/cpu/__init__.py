"""The x86 CPU target."""
