"""Decisions, stores that have them, and processes that write to them."""
