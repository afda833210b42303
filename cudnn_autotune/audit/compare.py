"""``compare``: which way to run a model is the fastest."""

from __future__ import annotations

import copy
import html
import itertools
import math
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cudnn_autotune.audit.ways import (
    MODEL,
    WAYS,
    Row,
    Runner,
    Task,
    code_of,
    folder_of,
    held_bytes,
    reason_of,
    serve,
)
from cudnn_autotune.core import versions
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.json_dataclass import encode
from cudnn_autotune.nn.backend.comparison import is_among_ranks, paired
from cudnn_autotune.nn.modules import check_model
from cudnn_autotune.nn.untouched import check_initialized, tensors_in
from cudnn_autotune.tuning.settings import get_sampling

_PROCESSES = multiprocessing.get_context("spawn")
_START_S = 180.0
_BLOCK_MS = 100.0
_ROUNDS = 12
# Long steps have fewer rounds: none begins after these seconds, once there are _LEAST_ROUNDS.
_TURNS_S, _LEAST_ROUNDS = 30.0, 3
_COLUMNS = (
    *("way", "step, ms", "spread", "speed-up", "first call, s", "peak, MiB"),
    *("error, output", "error, gradients"),
)


@dataclass(frozen=True)
class ModelComparison:
    """The outcome of :func:`compare`. ``print`` shows it as a table, and a notebook too."""

    subject: str
    """The model's class, the step, and the device."""
    rows: tuple[Row, ...]
    """One for each way, in the order of ``ways``."""
    notes: tuple[str, ...] = ()
    """What limits the comparison."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it early."""

    @property
    def fastest(self) -> Row | None:
        """The row of the fastest way; None if none could be measured."""
        return self._fastest(self.rows)

    @property
    def verdict(self) -> str:
        """The fastest way in a sentence, and how much faster it is than PyTorch's best."""
        best = self.fastest
        if best is None or best.step_ms is None:
            return "no way could be measured"
        theirs = self._fastest([row for row in self.rows if not WAYS[row.way].is_ours])
        ours = self._fastest([row for row in self.rows if WAYS[row.way].is_ours])
        other = ours if best is theirs else theirs
        text = f"fastest: {best.label}"
        if other is not None and other.step_ms is not None:
            of = "this package's" if best is theirs else "PyTorch's"
            text += (
                f", {other.step_ms / best.step_ms:.2f} times as fast as {of} best, {other.label}"
            )
        return text

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison and the environment as JSON values; NaN is None there."""
        made = {**encode(self), "verdict": self.verdict, "environment": versions.environment()}
        return made | {"rows": [vars(row) | encode(row) for row in self.rows]}

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as printed:
            self.show(console)
        return printed.get()

    def show(self, console: Any) -> None:
        """Prints the table on a ``rich.console.Console``, and the lines of code to use."""
        from rich.text import Text

        from cudnn_autotune.audit.table import Table

        rows, note = list(map(_cells, self.rows)), "\n".join(self._notes())
        for table in Table(self.subject, _COLUMNS, rows, note=note).rich(console.width):
            console.print(table)
        console.print(Text("\n".join([self.verdict, *self._code()])))

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        rows = [line("th", _COLUMNS), *(line("td", _cells(row)) for row in self.rows)]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return (
            f"<table><caption>{html.escape(self.subject)}</caption>{''.join(rows)}</table>"
            f"<ul>{notes}</ul><p>{html.escape(self.verdict)}</p>"
            f"<pre>{html.escape(chr(10).join(self._code()))}</pre>"
        )

    def _notes(self) -> list[str]:
        ended = ["interrupted: times are of what had run until then"] * self.was_interrupted
        return [*ended, *self.notes, *(f"{r.label}: {r.note}" for r in self.rows if r.note)]

    def _code(self) -> tuple[str, ...]:
        return () if self.fastest is None else tuple(f"  {line}" for line in self.fastest.code)

    @staticmethod
    def _fastest(rows: Sequence[Row]) -> Row | None:
        timed = [row for row in rows if row.step_ms is not None]
        return min(timed, key=lambda row: row.step_ms or 0.0, default=None)


def compare(
    model: nn.Module,
    *inputs: Any,
    train: bool | None = None,
    autocast: torch.dtype | None = None,
    ways: Sequence[str] | None = None,
    time_limit_s: float = 300.0,
) -> ModelComparison:
    """Runs a model in several ways, and tells which is the fastest on this GPU.

    Each way has a fresh process, with nothing compiled or tuned before: PyTorch never tunes again a
    shape that it has seen. Processes make the first call one after the other, and then take turns,
    one at a time: blocks of about 100 ms, at most 12 of each way. What is tuned is not kept. A
    ratio is the median of those of a round, whose ways share the GPU's clock. A step is called as
    by a program, so what the host takes counts where the GPU waits for it.

    The model and its inputs are sent to the processes by ``pickle``. A script that calls this
    function therefore needs ``if __name__ == "__main__":``. What cannot be pickled, or is defined
    in a notebook, runs in this process, which the result's notes say: without ``"eager"``, with
    what the process has tuned and compiled before, and without a time limit.

    Args:
        model: a model on one device, which does not change. It is left in its modes (``train()``,
            ``eval()``).
        inputs: its positional arguments, on the same device: tensors of any shape and dtype, or
            containers of tensors.
        train: whether a step is a forward and a backward, from random gradients of the outputs and
            without an optimizer; else a forward without gradients. None: whether the model is in
            training mode.
        autocast: the dtype of ``torch.autocast``; None: it is off.
        ways: which of ``"eager"`` (with ``torch.backends.cudnn.benchmark`` off; it is on in
            PyTorch's other ways), ``"benchmark"``, ``"channels_last"``, ``"compile"``,
            ``"max-autotune"``, ``"convert"`` and ``"backend"``; None: all.
        time_limit_s: the most seconds that the first call of a way, or one of its turns, may take.

    Returns:
        The comparison. A way that fails, for lack of memory too, or exceeds its time limit has a
        row that says why. After Ctrl-C it holds what was measured until then.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: another argument is not one of the above; the model has lazy parameters, is
            compiled already, or is not on one device with its inputs.
        RuntimeError: the process is one of several ranks.
    """
    check_model(model)
    check_initialized(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("model must not be compiled already: give what torch.compile got")
    if is_among_ranks():
        raise RuntimeError("compare() cannot run in one of several ranks: each has its own clock")
    names = list(WAYS) if ways is None else list(ways)
    if not names or len(set(names)) < len(names) or not set(names) <= WAYS.keys():
        raise ValueError(f"ways must be some of {', '.join(WAYS)}, each once, got {names}")
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be None, torch.float16 or bfloat16, got {autocast}")
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be a number above 0, got {time_limit_s}")
    tensors = tensors_in((list(model.parameters()), list(model.buffers()), inputs))
    devices = {str(tensor.device): tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"model and inputs must be on one device, got {sorted(devices) or 'none'}")
    (device,) = devices.values()
    train = model.training if train is None else train
    shapes = [f"{'x'.join(map(str, t.shape))} {t.dtype}" for t in tensors_in(inputs)]
    facts = [type(model).__name__, "forward + backward" if train else "forward", *shapes]
    facts += [f"autocast {autocast}"] * (autocast is not None)
    facts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else str(device))
    with (
        tempfile.TemporaryDirectory(prefix="cudnn_autotune_", ignore_cleanup_errors=True) as folder,
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        _bar(len(names) + _ROUNDS) as tell,
    ):
        task = Task(
            folder,
            device,
            train,
            autocast,
            get_sampling(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.deterministic,
        )
        measured, was_interrupted = _Measurement(task, names, time_limit_s, tell), False
        try:
            measured.run(model, inputs)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            measured.end()
    subject = ", ".join(facts).replace("torch.", "")
    return ModelComparison(subject, measured.result(), tuple(measured.notes), was_interrupted)


class _Failure(Exception):
    """The reason why a way has no time."""


class _Process:
    """The process of a way; it starts at once. An empty name stands for the reference."""

    def __init__(self, name: str, task: Task) -> None:
        self._log = Path(f"{folder_of(name, task)}.log")
        self._connection, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=serve, args=(theirs, name, task))
        # A Ctrl-C of the terminal is for this process alone; the other one inherits the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def ask(self, limit_s: float, *request: Any) -> Any:
        """Returns the answer to a request, or after the start to none; raises _Failure."""
        try:
            if request:
                self._connection.send(request)
            if not self._connection.poll(limit_s):
                raise _Failure(f"no answer within the time limit of {limit_s:g} s")
            went_well, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            told = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
            last = next((line.strip() for line in reversed(told) if line.strip()), "")
            code = self._process.exitcode
            raise _Failure(f"its process ended with exit code {code}: {last}") from None
        if not went_well:
            raise _Failure(answer)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._connection.close()


class _Here:
    """The same, in this process."""

    def __init__(self, name: str, task: Task, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._runner: Runner | None = None
        self._given = name, task, model, inputs

    def ask(self, limit_s: float, *request: Any) -> Any:
        try:
            if request:
                return getattr(self._runner, request[0])(*request[1:])
            name, task, model, inputs = self._given
            held = held_bytes(task.device)
            copies = copy.deepcopy(model), copy.deepcopy(inputs)
            self._runner = Runner(name or "eager", task, *copies, held)
        except Exception as error:
            raise _Failure(reason_of(error)) from error

    def end(self) -> None:
        self._runner = None


class _Measurement:
    """The ways that take turns, and what was measured so far."""

    def __init__(
        self, task: Task, names: Sequence[str], limit_s: float, tell: Callable[[str], None]
    ) -> None:
        self._task, self._limit_s, self._tell = task, limit_s, tell
        self._start: Callable[[str], _Process | _Here] = lambda name: _Process(name, task)
        self._workers: dict[str, _Process | _Here] = {}
        self._rows = {n: Row(n, WAYS[n].label, code_of(n, task.train)) for n in names}
        self._samples: dict[str, list[float]] = {}
        self.notes: list[str] = []

    def run(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Measures all ways; may be interrupted at any time."""
        self._tell("float32")
        on_gpu, is_here = self._task.device.type == "cuda", False
        try:
            torch.save((model, inputs), Path(self._task.folder) / MODEL)
            self._open("").ask(_START_S)
        except Exception as error:  # whatever the pickling of a model raises
            self._end("")
            self.notes.append(
                "measured in this process, which may have compiled and tuned the model before: "
                f"another one cannot load it ({reason_of(error)})"
            )
            self._start, is_here = lambda name: _Here(name, self._task, model, inputs), True
        with _not_enabled() if is_here else nullcontext():
            with self._failing(""):
                if is_here:
                    self._open("").ask(0)
                self._workers[""].ask(self._limit_s, "expect")
            self._end("")
            for name in self._rows:
                reason = "" if on_gpu else WAYS[name].only_on_gpu
                if on_gpu and is_here and name == "eager":
                    reason = "it needs a process of its own, since PyTorch tunes a shape once"
                with self._failing(name):
                    if reason:
                        raise _Failure(reason)
                    self._open(name)
            for name in list(self._workers):
                self._tell(f"first call: {self._rows[name].label}")
                with self._failing(name):
                    self._workers[name].ask(_START_S)
                    self._rows[name] = self._workers[name].ask(self._limit_s, "begin")
                    self._samples[name] = []
            self._take_turns()

    def _take_turns(self) -> None:
        begin = time.monotonic()
        for index in range(_ROUNDS):
            if index >= _LEAST_ROUNDS and time.monotonic() - begin > _TURNS_S:
                break
            self._tell("turns")
            order = list(self._samples)
            for name in order if index % 2 else reversed(order):
                with self._failing(name):
                    steps = max(1, round(_BLOCK_MS / (self._rows[name].step_ms or _BLOCK_MS)))
                    step_ms = self._workers[name].ask(self._limit_s, "turn", steps)
                    self._samples[name].append(step_ms)

    def result(self) -> tuple[Row, ...]:
        """Returns the rows, with the times of all rounds that are complete."""
        rounds = min(map(len, self._samples.values()), default=0)
        samples = {name: some[:rounds] for name, some in self._samples.items()}
        rows = dict(self._rows)
        for name, step_ms in paired(samples).items() if rounds else ():
            quartiles = statistics.quantiles(samples[name]) if rounds > 1 else [0.0]
            spread = (quartiles[-1] - quartiles[0]) / 2 / statistics.median(samples[name])
            rows[name] = replace(rows[name], step_ms=step_ms, spread=spread if rounds > 1 else None)
        first = next((row.step_ms for row in rows.values() if row.step_ms is not None), None)
        return tuple(
            replace(row, speedup=first / row.step_ms) if first and row.step_ms else row
            for row in rows.values()
        )

    def end(self) -> None:
        """Ends all processes."""
        for name in list(self._workers):
            self._end(name)

    def _open(self, name: str) -> _Process | _Here:
        self._workers[name] = self._start(name)
        return self._workers[name]

    def _end(self, name: str) -> None:
        if name in self._workers:
            self._workers.pop(name).end()

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Notes a failure, after which the way takes no more turns."""
        try:
            yield
        except _Failure as failure:
            self._end(name)
            self._samples.pop(name, None)
            if name:
                self._rows[name] = replace(self._rows[name], step_ms=None, note=str(failure))
            else:
                self.notes.append(f"no error is known, since the model fails in float32: {failure}")


@contextmanager
def _not_enabled() -> Iterator[None]:
    """Takes back ``enable()`` for a while."""
    former = _C.exchange_process_wide(None) if extension_available() else None
    try:
        yield
    finally:
        if extension_available():
            _C.exchange_process_wide(former)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar in a terminal; yields what says the next part's name."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        parts = itertools.count()
        yield lambda text: bar.update(task, description=text, completed=next(parts))


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        if value is None:
            return "–"
        return "not finite" if math.isnan(value) else format(value, form)

    return (
        row.label,
        text(row.step_ms, ".4g"),
        "–" if row.spread is None else f"±{row.spread:.1%}",
        "–" if row.speedup is None else f"{row.speedup:.2f}×",
        text(row.first_call_s, ".3g"),
        text(row.peak_mib, ",.0f"),
        text(row.output_error, ".1e"),
        text(row.gradient_error, ".1e"),
    )
