"""``compare``: the fastest way to run a model."""

from __future__ import annotations

import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cudnn_autotune.comparing import pytorch_settings
from cudnn_autotune.comparing import ways as in_worker
from cudnn_autotune.comparing.result import ModelComparison, Row
from cudnn_autotune.comparing.ways import MODEL, WAYS, Runner, code_of, held_bytes
from cudnn_autotune.compile.communication import is_among_ranks
from cudnn_autotune.core.display import bar_console, printable
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.json_dataclass import encode
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.core.signals import ending_as_by_interrupt
from cudnn_autotune.nn.modules import check_inputs, check_model
from cudnn_autotune.nn.untouched import check_initialized, generators_kept, tensors_in
from cudnn_autotune.timers.programs import own_steps, paired
from cudnn_autotune.tools.processes import CaseFailure, Process, ProcessFailure
from cudnn_autotune.tuning.settings import get_sampling

_REFERENCE = "float32"
_BLOCK_MS = 100.0
_ROUNDS = 12
# Long steps have fewer rounds: after _LEAST_ROUNDS, no round begins later than these seconds.
_TURNS_S, _LEAST_ROUNDS = 30.0, 3


def compare(
    model: nn.Module,
    *inputs: Any,
    train: bool | None = None,
    autocast: torch.dtype | None = None,
    ways: Sequence[str] | str | None = None,
    time_limit_s: float = 300.0,
) -> ModelComparison:
    """Runs a model in several ways, and finds the fastest on this GPU.

    Each way has a fresh process, without earlier compilations or tuning: PyTorch never tunes a
    known shape again. Processes make the first call one after the other, and then take turns, one
    at a time: blocks of about 100 ms, at most 12 of each way. Choices are not kept. A ratio is the
    median over rounds, whose ways share the GPU's clock. A step is called as by a program, so the
    GPU's waits for the host count.

    The model and its inputs are sent to the processes by ``pickle``. A script that defines the
    model's classes needs ``if __name__ == "__main__":``. A model that cannot be pickled, or is
    defined in a notebook, runs in this process, as the result's notes say: without ``"eager"``,
    with the process's earlier tuning and compilations, and without a time limit.

    Args:
        model: a model on one device, which does not change. It is left in its modes (``train()``,
            ``eval()``).
        inputs: its positional arguments, on the same device: tensors of any shape and dtype, or
            containers of tensors.
        train: whether a step is a forward and a backward, from random gradients of the outputs and
            without an optimizer; else a forward without gradients. None: whether the model is in
            training mode.
        autocast: the dtype of ``torch.autocast``; None: it is off.
        ways: one or several of ``"eager"`` (with ``torch.backends.cudnn.benchmark`` off; it is on
            in PyTorch's other ways), ``"benchmark"``, ``"channels_last"``, ``"compile"``,
            ``"max-autotune"``, ``"convert"``, ``"backend"`` and ``"backend-graphs"`` (in CUDA
            graphs, as max-autotune is); None: all.
        time_limit_s: the most seconds of a way's first call, and of each of its turns.

    Returns:
        The comparison. A way that fails, for lack of memory too, or exceeds its time limit has a
        row with the reason. After Ctrl-C it has the measurements until then.

    Raises:
        TypeError: ``model`` is no module, its forward takes no such ``inputs``, ``train`` is no
            bool, or ``ways`` has no names.
        ValueError: another argument is not allowed; the model has lazy parameters, is compiled
            already, or is not on one device with its inputs; or it raises on them, in float32 and
            in the first of the ways.
        RuntimeError: the process is one of several ranks.
    """
    check_model(model)
    check_initialized(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("model must not be compiled already: give what torch.compile got")
    if in_worker.is_worker:
        raise RuntimeError('a script that calls compare() needs `if __name__ == "__main__":`')
    if is_among_ranks():
        raise RuntimeError("compare() cannot run in one of several ranks: each has its own clock")
    if ways is not None and not isinstance(ways, Iterable):
        raise TypeError(f"ways must be some of {', '.join(WAYS)}, got {ways!r}")
    names = list(WAYS) if ways is None else [ways] if isinstance(ways, str) else list(ways)
    if not names or not all(names.count(name) == 1 and name in [*WAYS] for name in names):
        unknown = next((name for name in names if name not in [*WAYS]), None)
        meant = did_you_mean(unknown, WAYS)
        raise ValueError(f"ways must be some of {', '.join(WAYS)}, each once, got {names}{meant}")
    if train is not None and not isinstance(train, bool):
        raise TypeError(f"train must be a bool or None, got {type(train).__name__}")
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be None, torch.float16 or bfloat16, got {autocast!r}")
    if not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be a number above 0, got {time_limit_s!r}")
    check_inputs(model, inputs, {})
    tensors = tensors_in((list(model.parameters()), list(model.buffers()), inputs))
    devices = {str(tensor.device): tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"model and inputs must be on one device, got {sorted(devices) or 'none'}")
    (device,) = devices.values()
    train = model.training if train is None else train
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the processes need the memory
    shapes = [f"{'x'.join(map(str, t.shape))} {t.dtype}" for t in tensors_in(inputs)]
    facts = [type(model).__name__, "forward + backward" if train else "forward", *shapes]
    facts += [f"autocast {autocast}"] * (autocast is not None)
    facts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else str(device))
    with (
        ending_as_by_interrupt(),
        tempfile.TemporaryDirectory(prefix="cudnn_autotune_", ignore_cleanup_errors=True) as folder,
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        _bar(1 + len(names) + _ROUNDS) as advance,
    ):
        task = {
            "backend": in_worker.__name__,
            "folder": folder,
            "device": str(device),
            "train": train,
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "settings": pytorch_settings.read(),
            "main": getattr(sys.modules["__main__"], "__file__", None) or "",
        }
        measured = _Measurement((model, inputs), task, names, time_limit_s, advance)
        was_interrupted = False
        try:
            try:
                measured.run()
            finally:
                measured.end()
        except KeyboardInterrupt:
            was_interrupted = True
            measured.end()  # the interrupt may have come within it
    subject = ", ".join(facts).replace("torch.", "")
    return ModelComparison(subject, measured.result(), tuple(measured.notes), was_interrupted)


def _process(name: str, folder: str) -> Process:
    """Starts a process without other processes' compilations and choices."""
    own = Path(folder) / f"way_{name}"
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDNN_AUTOTUNE_CACHE_DIR")
    environment = {variable: str(own / variable) for variable in variables}
    environment["CUDNN_AUTOTUNE_CACHE"] = "read_write"
    return Process(name, environment={**environment, "CUDNN_AUTOTUNE_SAMPLING": get_sampling()})


class _Here:
    """The work of a process, in this one."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._given = model, inputs
        self._runner: Runner | None = None

    def set_up(self, request: dict[str, Any]) -> None:
        held = held_bytes(torch.device(request["device"]))
        self._runner = Runner(request, *copy.deepcopy(self._given), held)

    def ask(self, request: dict[str, Any], limit_s: float) -> Any:
        assert self._runner is not None
        return encode(self._runner.work(request["task"], request["case"], request))

    def close(self) -> None:
        self._runner = None


class _Measurement:
    """The ways that take turns, and the measurements so far."""

    def __init__(
        self,
        given: tuple[nn.Module, tuple[Any, ...]],
        task: dict[str, Any],
        names: Sequence[str],
        limit_s: float,
        advance: Callable[[str], None],
    ) -> None:
        self._given, self._task, self._limit_s, self._advance = given, task, limit_s, advance
        self._on_gpu, self._is_here = torch.device(task["device"]).type == "cuda", False
        self._workers: dict[str, Process | _Here] = {}
        model, train = given[0], task["train"]
        self._rows = {n: Row(n, code_of(n, train, self._on_gpu, model)) for n in names}
        self._samples: dict[str, list[float]] = {}
        self._raised: dict[str, str] = {}  # errors of the model itself, by way
        self.notes: list[str] = []

    def run(self) -> None:
        """Measures all ways; may be interrupted at any time."""
        self._advance(_REFERENCE)
        try:
            torch.save(self._given, Path(self._task["folder"]) / MODEL)
            self._start(_REFERENCE)
            self._set_up(_REFERENCE)
        except Exception as error:  # the pickling of a model may raise any error
            self._end(_REFERENCE)
            self._is_here = True
            self.notes.append(
                "measured in this process, which may have compiled and tuned the model before: "
                f"another one cannot load it ({_reason(error, _REFERENCE)})"
            )
        with _untouched(self._task["device"]) if self._is_here else nullcontext():
            self._expect()
            for name in self._rows:
                reason = "" if self._on_gpu else WAYS[name].only_on_gpu
                if self._on_gpu and self._is_here and name == "eager":
                    reason = "it needs a process of its own, since PyTorch tunes a shape once"
                if reason:
                    self._rows[name] = replace(self._rows[name], note=reason)
                else:
                    self._start(name)
            for name in list(self._workers):
                self._advance(f"first call: {name}")
                with self._failing(name):
                    self._set_up(name)
                    self._rows[name] = replace(self._rows[name], **self._ask(name, "begin"))
                    self._samples[name] = []
                reason = self._raised.get(name, "")
                if reason and reason == self._raised.get(_REFERENCE) and not self._samples:
                    if reason.endswith(in_worker.NO_GRADIENT):
                        raise ValueError(f"train must be False: {in_worker.NO_GRADIENT}")
                    kind = type(self._given[0]).__name__
                    raise ValueError(f"inputs must be what {kind} takes, and it raises {reason}")
            self._take_turns()

    def _expect(self) -> None:
        with self._failing(_REFERENCE):
            if self._is_here:
                self._start(_REFERENCE)
                self._set_up(_REFERENCE)
            if reason := self._ask(_REFERENCE, "expect"):
                self.notes.append(reason)
        self._end(_REFERENCE)

    def _start(self, name: str) -> None:
        folder = self._task["folder"]
        self._workers[name] = _Here(*self._given) if self._is_here else _process(name, folder)

    def _set_up(self, name: str) -> None:
        way = "eager" if name == _REFERENCE else name
        self._workers[name].set_up({**self._task, "way": way})

    def _ask(self, name: str, task: str, case: Any = None) -> Any:
        return self._workers[name].ask({"task": task, "case": case}, self._limit_s)

    def _take_turns(self) -> None:
        begin = time.monotonic()
        for index in range(_ROUNDS):
            if index >= _LEAST_ROUNDS and time.monotonic() - begin > _TURNS_S:
                break
            self._advance("turns")
            order = list(self._samples)
            for name in order if index % 2 else reversed(order):
                with self._failing(name):
                    steps = max(1, round(_BLOCK_MS / (self._rows[name].step_ms or _BLOCK_MS)))
                    self._samples[name].append(self._ask(name, "turn", steps))

    def result(self) -> tuple[Row, ...]:
        """Returns the rows, with the times of all complete rounds."""
        rounds = min(map(len, self._samples.values()), default=0)
        samples = {name: some[:rounds] for name, some in self._samples.items()}
        rows = dict(self._rows)
        for name, step_ms in paired(samples).items() if rounds else ():
            spread = None
            if rounds > 1:
                low, median, high = statistics.quantiles(samples[name])
                spread = (high - low) / 2 / median
            rows[name] = replace(rows[name], step_ms=step_ms, spread=spread)
        first = next((row.step_ms for row in rows.values() if row.step_ms is not None), None)
        return tuple(
            replace(row, speedup=first / row.step_ms) if first and row.step_ms else row
            for row in rows.values()
        )

    def end(self) -> None:
        """Ends all processes."""
        for name in list(self._workers):
            self._end(name)

    def _end(self, name: str) -> None:
        if name in self._workers:
            self._workers[name].close()
            del self._workers[name]

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Notes a failure, after which the way takes no more turns."""
        try:
            yield
        except Exception as error:  # the user's own code runs here
            reason = _reason(error, name)
            if not isinstance(error, ProcessFailure) and "OutOfMemoryError" not in reason:
                self._raised[name] = reason
            self._end(name)
            self._samples.pop(name, None)
            if name == _REFERENCE:
                self.notes.append(f"errors are not known: float32 fails: {reason}")
            else:
                self._rows[name] = replace(self._rows[name], step_ms=None, note=reason)


def _reason(error: Exception, name: str) -> str:
    """Returns the failure of a way in one line."""
    is_told = isinstance(error, (CaseFailure, ProcessFailure))
    text = str(error) if is_told else f"{type(error).__name__}: {error}"
    return printable(" ".join(text.removeprefix(f"{name}: ").split()))[:300]


@contextmanager
def _untouched(name: str) -> Iterator[None]:
    """Takes back ``enable()`` within the context, and afterwards the marks of steps. Restores the
    random number generators of the CPU and of the named device."""
    device = torch.device(name)
    devices = [device.index] if device.type == "cuda" else []
    former = _C.exchange_process_wide(None) if extension_available() else None
    try:
        with own_steps(), generators_kept(devices):
            yield
    finally:
        if extension_available():
            _C.exchange_process_wide(former)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar in a terminal or notebook; yields the function that names the next
    part."""
    console = bar_console()
    if console is None:
        yield lambda text: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        parts = itertools.count()
        yield lambda text: bar.update(task, description=text, completed=next(parts))
