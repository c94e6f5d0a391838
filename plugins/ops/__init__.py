"""One file per op: schema, shape rule and numpy reference. The file name is the op's name."""
