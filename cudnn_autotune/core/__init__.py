"""What every room stands on: the compiled part, versions, and reading and writing files."""
