"""The commands of ``cudnn-autotune`` that work on stored decisions, and the one that makes them."""
