"""Whole models, for tests of the backend, of ``convert`` and of ``compare``."""
