"""Parts that every folder uses: the compiled extension, versions, files, and guarded memory."""
