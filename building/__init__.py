"""How setup.py builds the extension: requirements, headers, sources, and the build command."""
