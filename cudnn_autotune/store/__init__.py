"""The room that keeps decisions on disk, for many processes and machines."""
