"""The ways to run a model that ``compare`` compares, and the process that runs one of them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from cudnn_autotune.nn.backend.comparison import begin_step
from cudnn_autotune.nn.backend.entry import compilations
from cudnn_autotune.nn.models import memory_format
from cudnn_autotune.nn.models.convert import conversion, convert, revert
from cudnn_autotune.nn.untouched import tensors_in
from cudnn_autotune.store.settings import set_store
from cudnn_autotune.tuning.settings import set_sampling

EXPECTED, MODEL = "expected", "model"
"""Names of files in the folder of a task."""

_WARM_UPS = 3  # Inductor records a CUDA graph at the second call, and replays it at the third.
# In float32, two runs that differ by more than this draw random numbers.
_RANDOM = 1e-3
_BENCHMARK = "torch.backends.cudnn.benchmark = True"
_CONVERT = 'model = cudnn_autotune.convert(model, memory_format="auto", example_input=inputs)'

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Way:
    """One way to run a model."""

    label: str
    code: tuple[str, ...]
    """Lines that a program needs, in which ``inputs`` is the tuple of the model's arguments."""
    prepare: Callable[[nn.Module, Inputs], Any] = lambda model, inputs: model
    """Returns what is called in place of the model."""
    benchmark: bool = True
    """Value of ``torch.backends.cudnn.benchmark``."""
    is_ours: bool = False
    only_on_gpu: str = ""
    """Reason why the way is left out where the device is not CUDA; empty if it is not."""


def _channels_last(model: nn.Module, inputs: Inputs) -> nn.Module:
    memory_format.apply(model, torch.channels_last)
    return model


def _converted(model: nn.Module, inputs: Inputs) -> nn.Module:
    return convert(model, memory_format="auto", example_input=inputs)


def _max_autotuned(model: nn.Module, inputs: Inputs) -> Any:
    return torch.compile(model, mode="max-autotune")


def _by_backend(model: nn.Module, inputs: Inputs) -> Any:
    # The layout of a training graph stays what the weights have (see docs/fusing.md).
    model = _converted(model, inputs) if torch.is_grad_enabled() else model
    return torch.compile(model, backend="cudnn_autotune")


_OURS = "cudnn_autotune leaves this device's convolutions to PyTorch"
_COMPILE = 'model = torch.compile(model, backend="cudnn_autotune")'
WAYS = {
    "eager": Way("eager", (), benchmark=False),
    "benchmark": Way("eager, benchmark", (_BENCHMARK,), only_on_gpu="cuDNN is not used here"),
    "channels_last": Way(
        "eager, benchmark, channels_last",
        (_BENCHMARK, "model = model.to(memory_format=torch.channels_last)"),
        _channels_last,
    ),
    "compile": Way(
        "torch.compile",
        (_BENCHMARK, "model = torch.compile(model)"),
        lambda model, inputs: torch.compile(model),
    ),
    "max-autotune": Way(
        "torch.compile, max-autotune",
        (_BENCHMARK, 'model = torch.compile(model, mode="max-autotune")'),
        _max_autotuned,
    ),
    "convert": Way("convert", (_CONVERT,), _converted, is_ours=True, only_on_gpu=_OURS),
    "backend": Way("backend", (_COMPILE,), _by_backend, is_ours=True, only_on_gpu=_OURS),
}


def code_of(name: str, train: bool) -> tuple[str, ...]:
    """Returns the lines of code of a way in inference or training."""
    before = (_CONVERT,) if name == "backend" and train else ()
    return before + WAYS[name].code


@dataclass(frozen=True)
class Task:
    """A description of what every process measures."""

    folder: str
    """Path of a folder with the file ``model`` (the model and its inputs); the file ``expected``
    is written there."""
    device: torch.device
    train: bool
    """Whether a step has a backward."""
    autocast: torch.dtype | None
    sampling: str
    """Sampling mode of this package's ways."""
    threads: int
    """Number of threads of PyTorch on the CPU."""
    matmul_precision: str
    is_deterministic: bool


@dataclass(frozen=True)
class Row:
    """The measurement of one way."""

    way: str
    label: str
    code: tuple[str, ...]
    """Lines that a program needs, in which ``inputs`` is the tuple of the model's arguments."""
    step_ms: float | None = None
    """Median milliseconds of a step; None if there is none."""
    spread: float | None = None
    """Half the interquartile range of the blocks' times, relative to their median."""
    speedup: float | None = None
    """Time of a step of the first way that could be measured, over this one's."""
    first_call_s: float | None = None
    """Seconds of preparing the model (compiling, tuning) and its first step, with nothing cached,
    in a process that has imported torch and made its CUDA context."""
    peak_mib: float | None = None
    """Most memory (MiB) during a step, in tensors and CUDA graphs, weights included; None without a
    GPU."""
    output_error: float | None = None
    """Norm of the difference of the outputs from those of float32 without TF32, over their norm;
    NaN if something is not finite, None if it cannot be told."""
    gradient_error: float | None = None
    """The same of the gradients of all parameters; None without a backward."""
    note: str = ""
    """What the way chose, or why there is no time."""


class Runner:
    """A model in one of the ways.

    Args:
        model: a module of the runner's own.
        held: bytes of the GPU's memory that were in use before the model was made.
    """

    def __init__(self, name: str, task: Task, model: nn.Module, inputs: Inputs, held: int) -> None:
        self._name, self._way, self._task, self._held = name, WAYS[name], task, held
        self._model, self._inputs, self._autocast = revert(model), inputs, task.autocast
        self._run: Any = self._model
        self._outputs: list[Tensor] = []
        self._ones: list[Tensor] = []
        self._compiled = len(compilations())
        kept = [*model.buffers(), *tensors_in(inputs)]
        self._before = [(tensor, tensor.detach().clone()) for tensor in kept]

    def begin(self) -> Row:
        """Prepares the model, runs its first steps, and compares their results with ``expected``.

        Raises:
            Exception: whatever the model or a compiler raises.
        """
        with _set(torch.backends.cudnn, "benchmark", self._way.benchmark):
            self._wait()
            begin = time.perf_counter()
            with self._mode():
                self._run = self._way.prepare(self._model, self._inputs)
            self._step()
            self._wait()
            first_call_s = time.perf_counter() - begin
            self._timed(_WARM_UPS)
            output_error, gradient_error = self._errors()
            row = Row(
                self._name,
                self._way.label,
                code_of(self._name, self._task.train),
                step_ms=self._timed(1),
                first_call_s=first_call_s,
                peak_mib=self._peak_mib(),
                output_error=output_error,
                gradient_error=gradient_error,
                note=self._note(),
            )
            self._rest()
        return row

    def turn(self, steps: int) -> float:
        """Returns the milliseconds of a step, of some steps after two that do not count."""
        with _set(torch.backends.cudnn, "benchmark", self._way.benchmark):
            self._timed(2)
            step_ms = self._timed(steps)
            self._rest()
        return step_ms

    def expect(self) -> None:
        """Writes what a step computes in float32, without TF32, into the file ``expected``; None
        if the model draws random numbers."""
        self._model.float()
        self._autocast, self._inputs = None, tree_map(_in_float32, self._inputs)
        kept = [*self._model.buffers(), *tensors_in(self._inputs)]
        self._before = [(tensor, tensor.detach().clone()) for tensor in kept]
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision=None)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with exact:
                found, again = self._results(seed=0), self._results(seed=1)
        finally:
            torch.set_float32_matmul_precision(precision)
        errors = [relative_error(*pair) for pair in zip(again, found, strict=True)]
        is_random = any(error is None or error > _RANDOM for error in errors)
        torch.save(None if is_random else found, Path(self._task.folder) / EXPECTED)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """The modes in which a user's program runs the forward."""
        dtype = self._autocast or torch.bfloat16
        with (
            torch.set_grad_enabled(self._task.train),
            torch.autocast(self._task.device.type, dtype, enabled=self._autocast is not None),
        ):
            yield

    def _step(self) -> None:
        begin_step()
        self._forget()
        with self._mode():
            outputs = tensors_in(self._run(*self._inputs))
        outputs = [output for output in outputs if output.is_floating_point()]
        if self._task.train:
            learnt = [output for output in outputs if output.requires_grad]
            if not learnt:
                raise ValueError("no output of the model needs a gradient")
            torch.autograd.backward(learnt, self._gradients_of(learnt))
        # An output that holds on to the autograd graph would keep its tensors.
        self._outputs = [output.detach() for output in outputs]

    def _gradients_of(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns gradients of a made-up loss: random numbers, the same in each way."""
        if [one.shape for one in self._ones] != [output.shape for output in outputs]:
            generator = torch.Generator(self._task.device).manual_seed(0)
            self._ones = [
                torch.empty_like(output, requires_grad=False).copy_(
                    torch.randn(output.shape, generator=generator, device=output.device)
                )
                for output in outputs
            ]
        return self._ones

    def _timed(self, steps: int) -> float:
        """Returns the milliseconds of a step, with what the host adds to them."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        return 1e3 * (time.perf_counter() - begin) / steps

    def _results(self, seed: int) -> list[list[Tensor]]:
        """Returns the outputs of a step, and the gradients of the parameters."""
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.copy_(before)
        torch.manual_seed(seed)
        self._step()
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._model.parameters()
            if self._task.train and parameter.requires_grad
        ]
        return [[t.detach().float().cpu() for t in some] for some in (self._outputs, gradients)]

    def _errors(self) -> tuple[float | None, float | None]:
        file = Path(self._task.folder) / EXPECTED
        expected = torch.load(file) if file.exists() else None
        if expected is None:
            return None, None
        output, gradient = map(relative_error, self._results(seed=0), expected)
        return output, gradient if self._task.train else None

    def _peak_mib(self) -> float | None:
        if self._task.device.type != "cuda":
            return None
        self._rest()
        torch.cuda.reset_peak_memory_stats()
        self._step()
        self._wait()
        return (torch.cuda.max_memory_allocated() + _in_graphs() - self._held) / 2**20

    def _note(self) -> str:
        if self._name == "convert":
            return str(conversion(self._model).memory_format)
        made = compilations()[self._compiled :]
        return "; ".join(dict.fromkeys(f"{c.chosen} runs: {c.note}" for c in made if c.note))

    def _wait(self) -> None:
        if self._task.device.type == "cuda":
            torch.cuda.synchronize()

    def _forget(self) -> None:
        self._outputs = []
        self._model.zero_grad(set_to_none=True)

    def _rest(self) -> None:
        """Leaves the GPU's memory to the other ways."""
        self._forget()
        if self._task.device.type == "cuda":
            torch.cuda.empty_cache()


def loaded(name: str, task: Task) -> Runner:
    """Returns the runner of a way for the model in the task's folder."""
    held = held_bytes(task.device)
    model, inputs = torch.load(Path(task.folder) / MODEL, weights_only=False)
    return Runner(name, task, model, inputs, held)


def held_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's memory that this process uses; 0 for another device."""
    return torch.cuda.memory_allocated() + _in_graphs() if device.type == "cuda" else 0


def _in_graphs() -> int:
    """Returns the bytes that CUDA graphs keep for their replays, beside tensors."""
    segments = torch.cuda.memory_snapshot()
    own = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """Returns the norm of the differences over that of what is expected; NaN if something is not
    finite, None if there is nothing to compare."""
    if not expected or [t.shape for t in found] != [t.shape for t in expected]:
        return None

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(torch.linalg.vector_norm(t.double()).item() for t in tensors))

    error = norm(a - b for a, b in zip(found, expected, strict=True))
    return error / max(norm(expected), 1e-30) if math.isfinite(error) else math.nan


def reason_of(error: BaseException) -> str:
    """Returns the words of an error in one line."""
    text = " ".join(str(error).split("\n\n")[0].split())[:300]
    if "out of memory" in text.lower():
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def folder_of(name: str, task: Task) -> Path:
    """Returns the folder of a way's own caches, beside which is its log."""
    return Path(task.folder) / f"way_{name}"


def serve(connection: Connection, name: str, task: Task) -> None:
    """Runs a way in this process: loads the model, and then calls the runner's methods as it is
    told. Each answer is a bool, whether it went well, and the result or a reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    own = folder_of(name, task)
    with open(f"{own}.log", "w", encoding="utf-8") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    # No way finds what another one, or an earlier run, has compiled or tuned.
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        os.environ[variable] = str(own / variable)
    set_store(own / "store", mode="read_write")
    runner: Runner | None = None

    def answer(request: tuple[Any, ...]) -> Any:
        nonlocal runner
        if runner is not None:
            return getattr(runner, request[0])(*request[1:])
        torch.set_num_threads(task.threads)
        torch.set_float32_matmul_precision(task.matmul_precision)
        torch.backends.cudnn.deterministic = task.is_deterministic
        set_sampling(task.sampling)
        if task.device.type == "cuda":
            torch.cuda.set_device(task.device)
        runner = loaded(name or "eager", task)

    request: tuple[Any, ...] = ()
    while True:
        try:
            reply = True, answer(request)
        except Exception as error:  # the other ways go on
            reply = False, reason_of(error)
        connection.send(reply)
        try:
            request = connection.recv()
        except EOFError:
            return


def calibrate(model: nn.Module, inputs: Sequence[Any]) -> None:
    """Runs the model once in training mode, which gives its batch norms the mean and the variance
    of their inputs, as a trained model's have. What an untrained one makes of random inputs can
    overflow float16. The modules' modes stay as they are."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    before = [(norm, norm.momentum) for norm in norms]
    modes = [(module, module.training) for module in model.modules()]
    for norm in norms:
        norm.momentum = 1.0
    try:
        # Not with benchmark on: these may not be the shapes that are measured.
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
