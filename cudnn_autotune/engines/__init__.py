"""A convolution problem, and the engine configs and other ways that could compute it."""
