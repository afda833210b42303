"""The layers and functions that a user calls, their operators, and the problems of a model."""
