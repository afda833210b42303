"""The separate process of a user's implementation's first runs (see ``isolated_run``)."""

from __future__ import annotations

import json
import pickle
import socket
from typing import IO

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import GuardedMemory
from cudnn_autotune.engines.candidate_id import of_implementation
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_from_json
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.implementing.user_implementation import UserImplementation
from cudnn_autotune.timers.measuring import WRITTEN, added_names, operands
from cudnn_autotune.tuning.checking import relative_error, tolerance
from cudnn_autotune.tuning.tune_problem import flags_of

_MOST_CHARACTERS = 1000
"""Length of the longest text of a message."""


def main(channel: int, task: IO[bytes]) -> None:
    """Reads a task and sends messages of one JSON object each: ``begun``, or the reason why no
    setting can be tried; then the outcome of each setting (``isolated_run.Outcome``), up to the
    first that does harm.

    Args:
        channel: descriptor of a socket that keeps the bounds of messages.
        task: file with the pickled implementation, settings, problem and device.
    """

    def send(**message: str) -> None:
        there.send(
            json.dumps({key: text[:_MOST_CHARACTERS] for key, text in message.items()}).encode()
        )

    there = socket.socket(fileno=channel)
    try:
        implementation, some_settings, problem_tree, device = pickle.load(task)
    except Exception as error:  # the import of a user's module may raise anything
        what = f"{type(error).__name__}: {error}"
        send(**{"not importable": f"it cannot be imported by name ({what})"})
        return
    try:
        problem = problem_from_json(problem_tree)
        data = _operands(problem, device)
    except Exception as error:  # memory is short, or the GPU admits one process only
        what = f"its operands cannot be made ({type(error).__name__}: {error})"
        if "out of memory" not in what.lower():
            send(untried=what)
            return
        send(begun="")
        for _ in some_settings:  # another problem may be smaller
            send(failure=what)
        return
    send(begun="")
    for settings in some_settings:
        outcome = _outcome(implementation, settings, problem, data)
        send(**outcome)
        if "harm" in outcome:
            return


def _operands(problem: ConvProblem, device: int | str) -> tuple[Tensor, ...]:
    if isinstance(device, int):
        torch.cuda.set_device(device)
    return operands(problem, torch.device("cuda", device) if isinstance(device, int) else device)


def _outcome(
    implementation: UserImplementation,
    settings: str,
    problem: ConvProblem,
    data: tuple[Tensor, ...],
) -> dict[str, str]:
    """Returns the outcome of a run, as a message. An exception does no harm elsewhere either, but
    leaves the setting's full run unknown."""
    try:
        with flags_of(problem, data[0].device.type):
            harm = harm_of(implementation, settings, problem, data)
        _wait(data[0].device)
    except Exception as error:
        try:
            _wait(data[0].device)
        except RuntimeError:
            return {"harm": f"in a process of its own it leaves the GPU in an error: {error}"}
        return {"failure": f"it raises {type(error).__name__}: {error}"}
    return {"harm": harm} if harm else {"passed": ""}


def harm_of(
    implementation: UserImplementation,
    settings: str,
    problem: ConvProblem,
    data: tuple[Tensor, ...],
) -> str:
    """Runs an implementation on copies of ``data`` between guard bands, and returns its fault;
    empty if it has none."""
    text = of_implementation(implementation.name, implementation.version, settings).text
    recipe, device = implementation.built(problem, settings), data[0].device
    plan = recipe_plan(problem, text, recipe, device.index or 0)
    memories = [GuardedMemory.like(tensor) for tensor in data]
    workspace = GuardedMemory(plan.workspace_bytes, device)
    copies = [
        memory.as_tensor(tensor).copy_(tensor)
        for memory, tensor in zip(memories, data, strict=True)
    ]

    short: list[torch.OutOfMemoryError] = []

    def run() -> None:
        try:
            _C.execute(plan, *copies, workspace=workspace.memory)
        except torch.OutOfMemoryError as error:
            short.append(error)
            raise

    error = relative_error(problem, run, *copies)
    if short:  # it did not run to its end
        raise short[0]
    names = _names(problem)
    for name, memory in zip((*names, "workspace"), (*memories, workspace), strict=True):
        if memory.is_touched():
            return f"it writes outside of {name}"
    for name, copy, tensor in zip(names, copies, data, strict=True):
        if name != "xwy"[WRITTEN[problem.op]] and not torch.equal(copy, tensor):
            return f"it writes to {name}, which it may only read"
    if error is not None and error > tolerance(problem):
        return f"its output is wrong (relative error {error:.3g})"
    return ""


def _names(problem: ConvProblem) -> list[str]:
    return [*"xwy", *added_names(problem)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
