"""All that a sampling mode sees of a GPU: a real one, a recording, or a simulation."""
