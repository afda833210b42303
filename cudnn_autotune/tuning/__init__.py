"""What happens where nothing is remembered: look it up, else search, check and remember."""
