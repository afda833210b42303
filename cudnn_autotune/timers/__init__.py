"""All that a sampling mode sees of a GPU: a real one, or a recording of one."""
