"""Which precisions a model takes: size, speed and loss of recipes, measured."""
