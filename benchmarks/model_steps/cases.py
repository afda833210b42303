"""What is compared: the rows (a model, a step, a layout) and the columns (ways to run it)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODELS = ("resnet50", "mobilenet_v3_large", "convnext_tiny")
# Step -> what it is called in a table.
STEPS = {
    "infer": "inference",
    "infer_frozen": "inference, frozen",
    "train": "training",
}
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    step: str
    layout: str

    @property
    def id(self) -> str:
        return f"{self.model}/{self.step}/{self.layout}"

    @property
    def is_training(self) -> bool:
        return self.step == "train"


def cases(models: Sequence[str], steps: Sequence[str], layouts: Sequence[str]) -> Iterator[Case]:
    for model in models:
        for step in steps:
            for layout in layouts:
                yield Case(model, step, layout)


@dataclass(frozen=True)
class Implementation:
    """One implementation of a step."""

    label: str
    is_ours: bool
    """Whether the convolutions are this package's."""


REFERENCE = "compile"
WAYS = {
    REFERENCE: Implementation("nn.Conv2d", is_ours=False),
    "compile_ours": Implementation("ours", is_ours=True),
}

# PyTorch keeps what cudnn.benchmark found for as long as a process lives, so each of its modes has
# a process of its own, with every way beside it.
PYTORCH = {
    "pytorch_off": "benchmark off",
    "pytorch_on_10": "benchmark on, limit 10",
}
WARM_UP = "warm_up"


def process_name(pytorch: str, case: Case) -> str:
    """Of a worker: ``pytorch`` is one of :data:`PYTORCH`, or :data:`WARM_UP`."""
    return f"{pytorch}:{case.id}"
