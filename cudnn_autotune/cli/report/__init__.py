"""Describes a store's decisions in words, tables and one HTML page."""
