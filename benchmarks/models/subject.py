"""A model with its inputs, and its step, which is captured, replayed and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common.network import create
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.comparing.ways import calibrate
from cudnn_autotune.engines.conv_layout import laid_out
from cudnn_autotune.models import memory_format as layouts

from . import networks
from .cases import DECODERS, Case, Way, model_of

_WARM_UPS = 3
_EPS = torch.finfo(torch.float32).eps
_LEARNING_RATE = 1e-6
"""So small that thousands of steps on one random batch leave the numbers finite."""


class Subject:
    """A model with random weights and the inputs of a batch of random data, on the device.

    On a GPU an inference step is in a half type, and a training step runs in bfloat16 by autocast
    on weights in float32. A dry run on a CPU is in float32, on a tiny model.

    Args:
        batch: the largest that is measured.
        dtype: of inference on a GPU.
    """

    def __init__(
        self, case: Case, batch: int, device: str, dtype: torch.dtype = torch.float16
    ) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        is_tiny = device == "cpu"
        if case.model in networks.NETWORKS:
            with torch.device(device):
                model = networks.NETWORKS[case.model][is_tiny]()
        elif case.model in DECODERS:
            from . import decoders  # it needs diffusers

            with torch.device(device):
                model = decoders.create(case.model, is_tiny)
        else:
            model = create(case.model, device)
        known = model_of(case.model)
        shapes = known.inputs
        if is_tiny:
            shapes = known.tiny or tuple(
                (s[0], *(max(1, side // 10) for side in s[1:])) if s else s for s in shapes
            )
        _leave_nothing_to_chance(model)
        inputs = [torch.randn(batch, *shape, device=device) for shape in shapes]
        if not case.is_training:
            calibrate(model, inputs)
        if case.is_training or device == "cpu":
            dtype = torch.float32
        self.model = model.to(dtype).train(case.is_training)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.inputs = [x.to(dtype) for x in inputs]
        if case.layout == "channels_last":
            layouts.apply(self.model, torch.channels_last)
            self.inputs[0] = laid_out(self.inputs[0], torch.channels_last)

    def step(self, way: Way, batch: int) -> Step:
        """The step, to be run in this way; nothing is compiled yet."""
        model = copy.deepcopy(self.model)
        inputs = [x[:batch] for x in self.inputs]
        run: Any = model
        layout = ""
        if way.prepare == "convert":
            formats: Any = {
                "": {},
                "auto": {"memory_format": "auto", "example_input": tuple(inputs)},
                "channels_last": {"memory_format": torch.channels_last},
            }
            with self.autocast():
                given = formats[way.memory_format] | {"norms": way.norms}
                ca.convert(model, sampling=way.sampling or None, **given)
            layout = str(ca.conversion(model).memory_format or "")
        elif way.memory_format == "channels_last":
            layouts.apply(model, torch.channels_last)
        if way.compile is not None:
            # dynamic=False: another module of the same class is not a graph of unknown sizes.
            compiled = partial(torch.compile, dynamic=False, **way.compile)
            # A decoder compiles what it calls for each tile and each frame.
            run = model.compiled(compiled) if hasattr(model, "compiled") else compiled(model)
        return Step(self, model, run, inputs, self.autocast(), layout)

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """Bfloat16, for training on a GPU; nothing else, or if it is not enabled."""
        enabled = enabled and self.device == "cuda" and self.case.is_training
        return torch.autocast(self.device, torch.bfloat16, enabled=enabled)

    def reference(self, batch: int) -> dict[str, Tensor]:
        """Returns the step's results in float32, without TF32 and without the compiler."""
        model = copy.deepcopy(self.model).float()
        inputs = [x[:batch].float() for x in self.inputs]
        step = Step(self, model, model, inputs, self.autocast(False))
        # fp32_precision is the newer name of allow_tf32; None leaves it alone.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision=None):
            step()
            return step.results()


class Step:
    """A forward, and in training its backward, of a whole batch; then SGD's, if it is asked for."""

    def __init__(
        self,
        subject: Subject,
        model: nn.Module,
        run: Any,
        inputs: list[Tensor],
        autocast: torch.autocast,
        layout: str = "",
    ) -> None:
        self.layout = layout
        """Which layout was chosen, and why, where it was a choice."""
        self._subject, self.model, self._run, self._inputs = subject, model, run, inputs
        self._autocast = autocast
        self._outputs: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        if subject.case.step == "optimize":
            self._optimizer = torch.optim.SGD(
                model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=5e-5, fused=True
            )

    def __call__(self) -> None:
        if not self._subject.case.is_training:
            with torch.no_grad():
                self._outputs = _listed(self._run(*self._inputs))
            return
        self.model.zero_grad(set_to_none=True)
        with self._autocast:
            outputs = _listed(self._run(*self._inputs))
            loss = torch.stack([x.float().square().mean() for x in outputs]).sum()
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        # What holds on to the autograd graph keeps its streams.
        self._outputs = [x.detach() for x in outputs]

    def results(self) -> dict[str, Tensor]:
        """The outputs and the gradients of the convolutions' weights as they are now, by name."""
        found = {"outputs": torch.cat([x.float().flatten() for x in self._outputs])}
        of_1d = {
            f"{name}.weight"
            for name, module in self.model.named_modules()
            if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        }
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (parameter.dim() >= 4 or name in of_1d):
                found[name] = parameter.grad.float().clone()
        return found

    def peak_bytes(self) -> int:
        """The most memory that one step has at a time, beside the model and its inputs."""
        for _ in range(_WARM_UPS):
            self()
        self._forget()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def captured(self, pool: Any) -> Callable[[], None]:
        """Replays the CUDA graph of the step, which has run before on the same stream.

        Args:
            pool: the memory that all steps use, since each is over when the next one begins.
        """
        self._forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            self()
        return graph.replay

    def _forget(self) -> None:
        # Gradients that a graph allocates are written anew by each replay, not added to.
        self.model.zero_grad(set_to_none=True)
        self._outputs = []


def _listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over the norm of what is expected, by name.

    A gradient whose norm float32 cannot tell from zero, next to the largest one, counts as if its
    norm were that large.
    """
    norms = {name: float(tensor.norm()) for name, tensor in expected.items()}
    largest = max((norm for name, norm in norms.items() if name != "outputs"), default=0.0)
    norms |= {name: max(norm, largest * _EPS) for name, norm in norms.items() if name != "outputs"}
    return {
        name: float((found[name] - tensor).norm()) / max(norms[name], 1e-30)
        for name, tensor in expected.items()
    }


def _leave_nothing_to_chance(model: nn.Module) -> None:
    """Dropout and stochastic depth do nothing: outputs of two ways could not be compared else."""
    for module in model.modules():
        for name in ("p", "drop_prob"):  # of torch's and torchvision's modules, and of timm's
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
