"""Programs that measure or make things and are run by hand; each has its options in its first lines."""
