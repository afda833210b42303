"""Models that processes of ``compare`` load by name; most do harm in channels_last alone."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Takes (N, 3, H, W), with a batch norm whose statistics each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.conv.weight.is_contiguous(memory_format=torch.channels_last):
            self.harm()
        return {"y": self.norm(self.conv(x)).relu()}

    def harm(self) -> None:
        """Does what a way must survive."""


class Dies(Net):
    def harm(self) -> None:
        print("the end comes here", flush=True)
        os._exit(3)


class TooLarge(Net):
    def harm(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Hangs(Net):
    def harm(self) -> None:
        time.sleep(600)


class Here(Net):
    """Cannot be sent to a process, so that it is measured in the caller's, which is quicker."""

    def __init__(self) -> None:
        super().__init__()
        self.local = lambda x: x


class Draws(Here):
    """Its steps are not comparable."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": nn.functional.dropout(super().forward(x)["y"])}


class Moves(Net):
    """Its first call differs from all that follow, as with spectral norms."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"y": super().forward(x)["y"] * self.calls}


class Fails(Here):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        raise ValueError(f"no such size: {tuple(x.shape)}")


class Overflows(Here):
    """Its outputs are infinite in float16 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 60000 * 60000


class SaysTF32(nn.Module):
    """Fails with the setting that its process has."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"allow_tf32 is {torch.backends.cudnn.allow_tf32}")


class SaysSettings(nn.Conv2d):
    """Writes the settings of the last process that runs it into a file."""

    def __init__(self, path: str) -> None:
        super().__init__(3, 4, 3)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        of = torch.backends
        precisions = of.cudnn.conv.fp32_precision, of.cuda.matmul.fp32_precision
        rest = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        rest += (getattr(of.cudnn, "depthwise_kernel", "native"),)  # torch 2.14 and later have it
        Path(self.path).write_text(str((*precisions, *rest)))
        return super().forward(x)


class Deep(nn.Sequential):
    """Takes (N, 3, H, W); has enough work for a GPU to be measured."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for i, o in ((3, 64), (64, 64), (64, 128)):
            layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class ReturnsNone(Here):
    """Has no output that could be compared."""

    def forward(self, x: Tensor) -> None:
        super().forward(x)


class ReturnsIntegers(Here):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)["y"].argmax(1)


class Divides(Here):
    """Is not finite in any way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)["y"] / 0


class Grows(Here):
    """Its output is longer after each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)["y"].repeat(self.calls, 1, 1, 1)


class Colours(Here):
    """Its exception would control a terminal."""

    def harm(self) -> None:
        raise ValueError("\x1b[31mred\x1b]0;title\x07 \x9b2J\u202e \x08")


class Stuck(Net):
    """Says that it runs, and never returns. It has started a process."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        child = subprocess.Popen(["sleep", "600"])
        partial = Path(os.environ["STUCK"] + ".partial")
        partial.write_text(f"{os.getpid()} {child.pid}")
        partial.rename(os.environ["STUCK"])
        while True:
            x = super().forward(x)["y"][:, :3]


class StuckOfChannelsLast(Stuck):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        is_last = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x) if is_last else Net.forward(self, x)


def pair() -> tuple[nn.Module, tuple[Tensor]]:
    """Returns a model with its inputs."""
    return Here(), (torch.zeros(2, 3, 8, 8),)
