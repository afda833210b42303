"""What several tests use, and what other processes run."""
