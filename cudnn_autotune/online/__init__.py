"""The room of choices that the caller's own calls decide: the mode ``online``, and trials of new
sizes."""
