"""Engine in, tokens out."""
