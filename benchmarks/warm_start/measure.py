"""The worker of warm_start: the first steps of a model in a process that has just begun."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from common import numbers
from common.choices import choices_made
from common.modes import set_torch_mode, synchronize

from .modes import MODES, Mode, warm_up_order

_LATER_STEPS = 3


class Training:
    """A model with one batch, on the device, and nothing run yet."""

    def __init__(self, request: dict[str, Any], mode: Mode) -> None:
        import torch
        from common.network import build

        import cudnn_autotune as ca

        self.device = request["device"]
        dtype = torch.float32 if self.device == "cpu" else torch.float16
        self.model = build(request["model"], self.device, dtype)
        self.is_inference = request["inference"]
        self.model.train(not self.is_inference)
        self.run = self.model
        if mode.is_compiled:
            self.run = torch.compile(self.model, backend="cudnn_autotune")
        elif mode.sampling:
            ca.convert(self.model, mode.sampling)
        self.layers = len(ca.conversion(self.model).served)
        x = torch.randn(*request["shape"], device=self.device).to(dtype)
        self.input = x.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (len(x),), device=self.device)
        synchronize(self.device)

    def tune_ms(self) -> float:
        """Wall time of ``cudnn_autotune.tune``."""
        import cudnn_autotune as ca

        begin = time.perf_counter()
        ca.tune(self.model, self.input)
        return (time.perf_counter() - begin) * 1e3

    def step_ms(self) -> tuple[float, float]:
        """Wall time until the outputs are there, and until the gradients are."""
        import torch
        from common.network import LOSS_SCALE
        from torch.nn.functional import cross_entropy

        self.model.zero_grad(set_to_none=True)
        synchronize(self.device)
        begin = time.perf_counter()
        with torch.set_grad_enabled(not self.is_inference):
            outputs = self.run(self.input)
        synchronize(self.device)
        forward = time.perf_counter()
        if self.is_inference:
            return (forward - begin) * 1e3, (forward - begin) * 1e3
        (cross_entropy(outputs.float(), self.labels) * LOSS_SCALE).backward()
        synchronize(self.device)
        return (forward - begin) * 1e3, (time.perf_counter() - begin) * 1e3


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One record: the first step of ``request["mode"]``."""
    import torch

    from cudnn_autotune.timers.stopwatch import Stopwatch

    torch.manual_seed(0)
    mode = MODES[request["mode"]]
    _set(request["mode"], request["store"])
    training = Training(request, mode)
    tune_ms = training.tune_ms() if mode.is_tuned else 0.0
    forward_ms, both_ms = (tune_ms + ms for ms in training.step_ms())
    measurements = Stopwatch.uses
    later_ms = min(training.step_ms()[1] for _ in range(_LATER_STEPS))
    part: dict[str, Any] = {
        "forward_ms": numbers.significant(forward_ms),
        "both_ms": numbers.significant(both_ms),
        "later_ms": numbers.significant(later_ms),
    }
    if mode.sampling:
        part |= {"layers": training.layers, "choices": choices_made()}
        part["measurements"] = measurements
    yield part


def warm_up(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first step of every mode in one process: what they compile, and what they load from the
    disk, is found by those that come after it. Nothing is recorded of it but how long it took."""
    import torch

    import cudnn_autotune as ca

    torch.manual_seed(0)
    begin = time.perf_counter()
    for name in warm_up_order(request["modes"]):
        _set(name, None)
        Training(request, MODES[name]).step_ms()
        ca.forget()
    yield {"seconds": numbers.significant(time.perf_counter() - begin, 4)}


def _set(name: str, store: str | None) -> None:
    """PyTorch's flags where it is a mode of PyTorch's; the store, if there is to be one."""
    import cudnn_autotune as ca

    if name.startswith("pytorch"):
        set_torch_mode(name)
    ca.set_store(store, mode="off" if store is None else "read_write")
    if store is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(store, "inductor")
