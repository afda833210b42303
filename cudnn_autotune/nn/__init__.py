"""What a user puts into a model: the layers, their operators, and a model's problems."""
