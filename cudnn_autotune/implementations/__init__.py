"""What computes convolutions beside the engines of cuDNN."""
