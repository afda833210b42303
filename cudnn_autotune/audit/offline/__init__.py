"""Recordings of measurements on a GPU, and the timer that replays them without a GPU."""
