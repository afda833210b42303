"""Parts that every room uses: the compiled extension, versions, and reading and writing files."""
