"""The ways to run a model in ``compare``, and the runner of one of them in its process."""

from __future__ import annotations

import math
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from cudnn_autotune.comparing import pytorch_settings
from cudnn_autotune.compile.entry import compilations
from cudnn_autotune.models.convert import conversion, convert, revert
from cudnn_autotune.nn.untouched import seed_generators, tensors_in
from cudnn_autotune.timers.programs import begin_step

EXPECTED, MODEL = "expected", "model"
"""Names of files in the folder of a task."""
NO_GRADIENT = "no output of the model needs a gradient"
"""The error of a training step that trains nothing."""

_WARM_UPS = 3  # Inductor records a CUDA graph at the second call, and replays it at the third.
# In float32, two runs that differ by more than this draw random numbers.
_RANDOM = 1e-3
_BENCHMARK = "torch.backends.cudnn.benchmark = True"
_CHANNELS_LAST = "model = model.to(memory_format=torch.channels_last)"
# Module.to takes one format, and refuses weights of 4 and of 5 dimensions in one model.
_EACH_CHANNELS_LAST = (
    "formats = {4: torch.channels_last, 5: torch.channels_last_3d}",
    "for p in model.parameters():",
    "    p.data = p.data.contiguous(memory_format=formats.get(p.dim(), torch.contiguous_format))",
)
_CONVERT = (
    "import cudnn_autotune",
    'model = cudnn_autotune.convert(model, memory_format="auto", example_input=inputs)',
)

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Way:
    """One way to run a model."""

    code: tuple[str, ...]
    """The way's lines of a program, in which ``inputs`` is the tuple of the model's arguments."""
    prepare: Callable[[nn.Module, Inputs], Any] = lambda model, inputs: model
    """A function from the model and its inputs to the callable that replaces the model."""
    benchmark: bool = True
    """Value of ``torch.backends.cudnn.benchmark``."""
    is_ours: bool = False
    only_on_gpu: str = ""
    """Reason why the way is left out if the device is not CUDA; empty if it is not left out."""


def _channels_last(model: nn.Module, inputs: Inputs) -> nn.Module:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in model.parameters():  # Module.to takes one format for both
        if parameter.dim() in last:
            parameter.data = parameter.data.contiguous(memory_format=last[parameter.dim()])
    return model


def _converted(model: nn.Module, inputs: Inputs) -> nn.Module:
    return convert(model, memory_format="auto", example_input=inputs)


def _by_backend(model: nn.Module, inputs: Inputs, mode: str = "default") -> Any:
    # A training graph in another layout than the weights' copies them in each step.
    model = _converted(model, inputs) if torch.is_grad_enabled() else model
    return torch.compile(model, backend="cudnn_autotune", mode=mode)


_OURS = "it needs a CUDA GPU; without one the package runs PyTorch's convolutions"
_COMPILE = 'model = torch.compile(model, backend="cudnn_autotune")'
_IN_GRAPHS = 'model = torch.compile(model, backend="cudnn_autotune", mode="reduce-overhead")'
WAYS = {
    "eager": Way((), benchmark=False),
    "benchmark": Way((_BENCHMARK,), only_on_gpu="cuDNN is not used here"),
    "channels_last": Way(
        (_BENCHMARK, _CHANNELS_LAST),
        _channels_last,
    ),
    "compile": Way(
        (_BENCHMARK, "model = torch.compile(model)"),
        lambda model, inputs: torch.compile(model),
    ),
    "max-autotune": Way(
        (_BENCHMARK, 'model = torch.compile(model, mode="max-autotune")'),
        lambda model, inputs: torch.compile(model, mode="max-autotune"),
    ),
    "convert": Way(_CONVERT, _converted, is_ours=True, only_on_gpu=_OURS),
    "backend": Way((_COMPILE,), _by_backend, is_ours=True, only_on_gpu=_OURS),
    "backend-graphs": Way(
        (_IN_GRAPHS,),
        partial(_by_backend, mode="reduce-overhead"),
        is_ours=True,
        only_on_gpu=_OURS,
    ),
}


def code_of(name: str, train: bool, on_gpu: bool, model: nn.Module) -> tuple[str, ...]:
    """Returns the lines of code of a way for a model in inference or training, without settings of
    cuDNN on other devices."""
    before = _CONVERT if train and name in ("backend", "backend-graphs") else ()
    lines = [line for line in before + WAYS[name].code if on_gpu or line != _BENCHMARK]
    dims = {parameter.dim() for parameter in model.parameters()}
    if 5 in dims and _CHANNELS_LAST in lines:
        lines.remove(_CHANNELS_LAST)
        of_5 = (_CHANNELS_LAST.replace("channels_last", "channels_last_3d"),)
        lines += _EACH_CHANNELS_LAST if 4 in dims else of_5
    return tuple(lines)


class Runner:
    """A model in one of the ways.

    Args:
        task: a dict with ``way``, its name; ``folder``, the path of the files MODEL and EXPECTED;
            ``device``; ``train``; and ``autocast``, the name of a dtype or None.
        model: a module of the runner's own.
        held: bytes of the GPU's memory in use before the model was made.
    """

    def __init__(self, task: dict[str, Any], model: nn.Module, inputs: Inputs, held: int) -> None:
        self._task, self._way, self._held = task, WAYS[task["way"]], held
        self._expected = Path(task["folder"]) / EXPECTED
        self._device = torch.device(task["device"])
        self._autocast = getattr(torch, task["autocast"]) if task["autocast"] else None
        self._model, self._inputs = revert(model), inputs
        self._run: Any = self._model
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._compiled = len(compilations())
        self._keep()

    def work(self, task: str, case: Any, request: Any) -> Any:
        """Returns a method's result, for a worker of an audit."""
        with _set(torch.backends.cudnn, "benchmark", self._way.benchmark):
            done = {"begin": self._begin, "turn": self._turn, "expect": self._expect}[task](case)
            self._forget()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the other ways need the memory
        return done

    def _begin(self, _: Any) -> dict[str, Any]:
        """Prepares the model, runs its first steps, and compares their results; returns fields of
        ``compare.Row``."""
        self._wait()
        begin = time.perf_counter()
        with self._mode():
            self._run = self._way.prepare(self._model, self._inputs)
        self._step()
        self._wait()
        first_call_s = time.perf_counter() - begin
        self._timed(_WARM_UPS)
        outputs = gradients = None
        notes = [self._note()]
        if self._expected.exists():
            expected = torch.load(self._expected)
            found = self._results(seed=0)
            outputs, gradients = map(relative_error, found, expected)
            for name, tensors in zip(("outputs", "gradients"), found, strict=True):
                if not all(tensor.isfinite().all() for tensor in tensors):
                    notes.append(f"its {name} are not finite, unlike those in float32")
        return {
            "first_call_s": first_call_s,
            "step_ms": self._timed(1),
            "peak_mib": self._peak_mib(),
            "output_error": outputs,
            "gradient_error": gradients,
            "note": "; ".join(filter(None, notes)),
        }

    def _turn(self, steps: int) -> float:
        """Returns the milliseconds of a step, over some steps after two that do not count."""
        self._timed(2)
        return self._timed(steps)

    def _expect(self, _: Any) -> str:
        """Writes a step's results in float32, without TF32, into the file EXPECTED. Returns the
        reason why they are no reference; empty if they are."""
        self._model.float()
        self._autocast, self._inputs = None, tree_map(_in_float32, self._inputs)
        self._keep()
        with pytorch_settings.nothing_rounded():
            found, again = self._results(seed=0), self._results(seed=1)
        if reason := self._why_no_reference(found[0], again[0]):
            return f"errors are not known: {reason}"
        torch.save(found, self._expected)
        return ""

    @staticmethod
    def _why_no_reference(outputs: list[Tensor], again: list[Tensor]) -> str:
        """Returns the reason why the outputs of two equal steps in float32 are no reference; empty
        if they are."""
        if not outputs and not again:
            return "the model returns no tensor of floating-point numbers"
        if not all(tensor.isfinite().all() for tensor in (*outputs, *again)):
            return "the model's outputs are not finite in float32"
        if [t.shape for t in outputs] != [t.shape for t in again]:
            return "the shapes of the model's outputs change from call to call"
        error = relative_error(again, outputs)
        if error is None or error > _RANDOM:
            return "the model draws random numbers, or keeps a state from call to call"
        return ""

    def _keep(self) -> None:
        """Notes buffers and inputs, for :meth:`_results`."""
        kept = [*self._model.buffers(), *tensors_in(self._inputs)]
        self._before = [(tensor, tensor.detach().clone()) for tensor in kept]
        self._kept = sum(copy.nbytes for _, copy in self._before)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Enters the modes in which a program runs the forward."""
        dtype, is_on = self._autocast or torch.bfloat16, self._autocast is not None
        with (
            torch.set_grad_enabled(self._task["train"]),
            torch.autocast(self._device.type, dtype, enabled=is_on),
        ):
            yield

    def _step(self) -> None:
        begin_step()
        self._forget()
        with self._mode():
            found = [t for t in tensors_in(self._run(*self._inputs)) if t.is_floating_point()]
        if self._task["train"]:
            learnt = [output for output in found if output.requires_grad]
            if not learnt:
                raise ValueError(NO_GRADIENT)
            torch.autograd.backward(learnt, self._gradients_of(learnt))
        # An output that holds on to the autograd graph would keep its tensors.
        self._outputs = [output.detach() for output in found]

    def _gradients_of(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns random gradients, the same in each way."""
        if [one.shape for one in self._gradients] != [output.shape for output in outputs]:
            generator = torch.Generator(self._device).manual_seed(0)
            self._gradients = [
                torch.empty_like(output, requires_grad=False).copy_(
                    torch.randn(output.shape, generator=generator, device=output.device)
                )
                for output in outputs
            ]
        return self._gradients

    def _forget(self) -> None:
        self._outputs = []
        self._model.zero_grad(set_to_none=True)
        for tensor in tensors_in(self._inputs):
            if tensor.is_leaf:
                tensor.grad = None

    def _timed(self, steps: int) -> float:
        """Returns the milliseconds of a step, with the GPU's waits for the host."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        return 1e3 * (time.perf_counter() - begin) / steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _results(self, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs of a step from the first state, and the parameters' gradients."""
        with torch.no_grad():
            for tensor, before in self._before:
                if not torch.equal(tensor, before):  # an expanded input cannot be written to
                    tensor.copy_(before)
        seed_generators([self._device.index] if self._device.type == "cuda" else [], seed)
        self._step()
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._model.parameters()
            if self._task["train"] and parameter.requires_grad
        ]
        outputs, gradients = (
            [t.detach().float().cpu() for t in some] for some in (self._outputs, gradients)
        )
        return outputs, gradients

    def _peak_mib(self) -> float | None:
        if self._device.type != "cuda":
            return None
        self._forget()
        torch.cuda.reset_peak_memory_stats()
        self._step()
        self._wait()
        return (torch.cuda.max_memory_allocated() + _in_graphs() - self._held - self._kept) / 2**20

    def _note(self) -> str:
        """Returns the way's choices in words."""
        if self._task["way"] == "convert":
            return str(conversion(self._model).memory_format)
        made = compilations()[self._compiled :]
        return "; ".join(dict.fromkeys(f"{c.chosen} runs: {c.note}" for c in made if c.note))


def open_backend(request: dict[str, Any]) -> Runner:
    """Returns the runner of a process, for a worker of an audit. ``request`` is the runner's task,
    with ``pytorch_settings.read()`` of the calling process."""
    global is_worker
    is_worker = True
    pytorch_settings.write(request["settings"])
    device, file = torch.device(request["device"]), Path(request["folder"]) / MODEL
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        model, inputs = torch.load(file, weights_only=False)
    except AttributeError:  # a class of the program's main module, as in multiprocessing
        if not Path(request["main"]).is_file():
            raise
        made = runpy.run_path(request["main"], run_name="__mp_main__")
        vars(sys.modules["__main__"]).update(made)
        model, inputs = torch.load(file, weights_only=False)
    return Runner(request, model, inputs, 0)


is_worker = False
"""Whether this process runs a way for another one."""


def held_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's memory that this process uses; 0 for another device."""
    return torch.cuda.memory_allocated() + _in_graphs() if device.type == "cuda" else 0


def _in_graphs() -> int:
    """Returns the bytes that CUDA graphs keep for their replays, beside tensors."""
    segments = torch.cuda.memory_snapshot()
    own = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """Returns the norm of the differences over the norm of ``expected``; None if there are no
    tensors, or an element is not finite."""
    if not expected or [t.shape for t in found] != [t.shape for t in expected]:
        return None

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(torch.linalg.vector_norm(t.double()).item() for t in tensors))

    error = norm(a - b for a, b in zip(found, expected, strict=True))
    return error / max(norm(expected), 1e-30) if math.isfinite(error) else None


def calibrate(model: nn.Module, inputs: Sequence[Any]) -> None:
    """Runs the model once in training mode, which gives its batch norms the mean and the variance
    of their inputs, as in a trained model. An untrained one's results on random inputs can overflow
    float16. The modules' modes stay as they are."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    before = [(norm, norm.momentum) for norm in norms]
    modes = [(module, module.training) for module in model.modules()]
    for norm in norms:
        norm.momentum = 1.0
    try:
        # Not with benchmark on: the measured shapes may be others.
        with torch.no_grad(), _set(torch.backends.cudnn, "benchmark", False):
            model.train()(*inputs)
    finally:
        for norm, momentum in before:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training


@contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _in_float32(value: Any) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_floating else value
