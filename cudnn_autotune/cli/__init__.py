"""The commands of ``cudnn-autotune``, their tables, pages and demonstration."""
