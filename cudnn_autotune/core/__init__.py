"""Parts that every room uses: the compiled extension, versions, files, and guarded memory."""
