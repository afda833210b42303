"""Trains a small network on random images, by PyTorch alone.

    cudnn-autotune run examples/train_plain.py --steps 100
    python examples/train_plain.py --steps 100 --convert

`run` tunes the convolutions of the script as it is. With `--convert` the script converts its model:
on a GPU every convolution's engine is searched in the first step, in the faster of two layouts. The
checkpoint is that of a plain model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + x).relu()


def make(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 7, stride=2, padding=3),
        Block(channels),
        Block(channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch", type=int, help="default: 64, and 8 on a CPU")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--convert", action="store_true", help="by cudnn_autotune")
    parser.add_argument("--checkpoint", type=Path, help="write the trained weights here")
    options = parser.parse_args()

    device = options.device
    batch = options.batch or (8 if device == "cpu" else 64)
    images = torch.randn(batch, 3, options.size, options.size, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)

    model = make(options.channels).to(device)
    if options.convert:
        import cudnn_autotune

        with torch.autocast(device, torch.bfloat16):
            cudnn_autotune.convert(model, memory_format="auto", example_input=images)
        print(cudnn_autotune.conversion(model))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(options.steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")

    if options.checkpoint is not None:
        torch.save(model.state_dict(), options.checkpoint)


if __name__ == "__main__":
    main()
