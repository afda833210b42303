"""Trains a network with Lightning, with its convolutions tuned.

    pip install lightning
    python examples/train_lightning.py --steps 100

The model is converted where it is created, before Lightning moves it to a device or wraps it. The
first step of the training searches the engines.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cudnn_autotune


class Classifier(lightning.LightningModule):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 10),
        )
        cudnn_autotune.convert(self.network, memory_format=torch.channels_last)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="auto", help="of Lightning's Trainer")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    count = options.batch * options.steps
    images = torch.randn(count, 3, options.size, options.size)
    data = TensorDataset(images, torch.randint(0, 10, (count,)))
    model = Classifier(options.channels)
    print(cudnn_autotune.conversion(model))
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_steps=options.steps,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(data, options.batch, drop_last=True))
    print(f"loss {float(trainer.callback_metrics['loss']):.3f}")


if __name__ == "__main__":
    main()
