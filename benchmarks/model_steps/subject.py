"""A model with a batch, and its step: what is captured, replayed and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from common.network import create
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cudnn_autotune as ca

from .cases import Case, Implementation

_CLASSES = 10
_WARM_UPS = 3


class Subject:
    """A model with random weights and a batch with random images, on the device.

    On a GPU an inference step is in float16, and a training step runs in bfloat16 by autocast on
    weights in float32. A dry run on a CPU is in float32.

    Args:
        shape: of the images, (N, C, H, W).
    """

    def __init__(self, case: Case, shape: list[int], device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        model = create(case.model, device)
        _leave_nothing_to_chance(model)
        images = torch.randn(*shape, device=device)
        dtype = torch.float32
        if not case.is_training:
            _calibrate(model, images)
            dtype = torch.float16 if device == "cuda" else torch.float32
        memory_format = getattr(
            torch, "channels_last" if case.layout == "channels_last" else "contiguous_format"
        )
        model = model.to(dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        self.model = model.train(case.is_training)
        self.images = images.to(dtype).contiguous(memory_format=memory_format)
        self.labels = torch.randint(0, _CLASSES, (len(images),), device=device)

    def step(self, way: Implementation, mode: str) -> Step:
        """The step, to be run in this way; nothing is compiled yet. ``mode`` is of
        ``torch.compile``."""
        model = copy.deepcopy(self.model)
        if way.is_ours:
            ca.convert(model)
        # dynamic=False: another module of the same class is another graph, not one of unknown sizes
        compiled = torch.compile(model, mode=mode, dynamic=False)
        return Step(self, model, compiled, autocast=self.device == "cuda")

    def reference(self) -> dict[str, Tensor]:
        """What the step computes in float32, without TF32 and without the compiler."""
        model = copy.deepcopy(self.model).float()
        step = Step(self, model, model, autocast=False)
        # fp32_precision is the newer name of allow_tf32; None leaves it alone.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision=None):
            step(self.images.float())
            return step.results()


class Step:
    """A forward, and in training its backward, of a whole batch."""

    def __init__(
        self, subject: Subject, model: nn.Module, run: Callable[..., Tensor], *, autocast: bool
    ) -> None:
        self._subject, self.model, self._run = subject, model, run
        self._autocasts = autocast and subject.case.is_training
        self._outputs: Tensor | None = None

    def __call__(self, images: Tensor | None = None) -> None:
        subject = self._subject
        images = subject.images if images is None else images
        if not subject.case.is_training:
            with torch.no_grad():
                self._outputs = self._run(images)
            return
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(subject.device, torch.bfloat16, enabled=self._autocasts):
            outputs = self._run(images)
            loss = cross_entropy(outputs.float(), subject.labels)
        loss.backward()
        self._outputs = outputs.detach()  # what holds on to the autograd graph keeps its streams

    def results(self) -> dict[str, Tensor]:
        """The outputs and the gradients of the convolutions' weights as they are now, by name."""
        assert self._outputs is not None
        found = {"outputs": self._outputs}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.dim() == 4:
                found[name] = parameter.grad
        return {name: tensor.float().clone() for name, tensor in found.items()}

    def captured(self) -> Callable[[], None]:
        """Replays the CUDA graph of the step, which has run before on the same stream."""
        for _ in range(_WARM_UPS):
            self()
        # Gradients that the graph allocates are written anew by each replay, not added to.
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self()
        return graph.replay


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over the norm of what is expected, by name."""
    return {
        name: float((found[name] - tensor).norm() / tensor.norm().clamp_min(1e-30))
        for name, tensor in expected.items()
    }


def _leave_nothing_to_chance(model: nn.Module) -> None:
    """Dropout and stochastic depth do nothing: outputs of two ways could not be compared else."""
    for module in model.modules():
        for name in ("p", "drop_prob"):  # of torch's and torchvision's modules, and of timm's
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _calibrate(model: nn.Module, images: Tensor) -> None:
    """Batch norms get to know their inputs' mean and variance, as in a trained model: what an
    untrained one makes of random images overflows float16."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    for norm, value in zip(norms, before, strict=True):
        norm.momentum = value
