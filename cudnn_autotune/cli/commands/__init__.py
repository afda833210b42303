"""The commands of ``cudnn-autotune``, mostly one a file, and what they share."""
