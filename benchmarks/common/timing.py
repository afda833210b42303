"""Waiting for the device."""

from __future__ import annotations


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
