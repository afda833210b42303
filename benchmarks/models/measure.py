"""The worker of models: it compiles the ways of a case, and measures them in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from common import numbers, profiled
from common.choices import choices_made
from common.modes import set_torch_mode, synchronize
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune import sampling

from . import engines_alone, inductor_layout
from .cases import SETTLING, WAYS, Case
from .deadline import TimeIsUpError, until
from .gpu_lock import GpuLock
from .subject import Step, Subject, errors
from .turns import calibrate, take_turns

Part = dict[str, Any]

# A way's relative error may be this many times that of PyTorch's layers, and this much more.
TIMES, MORE = 2.0, 1e-3
# Graphs of one code: those of all ways, and of a decoder's frames and tiles of several sizes.
_GRAPHS = 16 * len(WAYS)
_NAME = 120  # characters of a kernel's name that are kept


def measure(request: dict[str, Any]) -> Iterator[Part]:
    """Of each batch: the first step of each way, their steps in turns, and how far their results
    are off."""
    set_torch_mode(request["pytorch"])
    ca.set_sampling(request["sampling"])
    if engines_alone.NAME not in sampling.names():
        sampling.register(engines_alone.EnginesAlone(sampling.get(request["sampling"])))
    ca.set_store(request["store"], mode="read_write")
    end = time.monotonic() + request["limit_s"] - request["turns_s"]
    lock = GpuLock(request["lock"])
    with lock.shared():
        subject = _begun(request, lock)
        for batch in sorted(request["batches"], reverse=True):
            torch._dynamo.reset()
            # Each way is a program of its own of the same code.
            torch._dynamo.config.recompile_limit = _GRAPHS
            torch._dynamo.config.accumulated_recompile_limit = _GRAPHS
            try:
                for part in _measured(subject, batch, request, lock, end):
                    yield {"batch": batch, **part}
            except Exception as error:  # the other batches are measured all the same
                yield {"batch": batch, **_failed("the batch", error)}
            gc.collect()


def _measured(
    subject: Subject, batch: int, request: dict[str, Any], lock: GpuLock, end: float
) -> Iterator[Part]:
    device = request["device"]
    steps: dict[str, Step] = {}
    for name in request["ways"]:
        if WAYS[name].mends and (reason := inductor_layout.nothing_to_mend()):
            yield {"part": "left_out", "way": name, "reason": reason}
            continue
        try:
            with until(min(end, time.monotonic() + request["way_limit"])):
                step, part = _first_step(subject, name, batch, lock, request["compiles_anew"])
        except TimeIsUpError:
            lock.acquire()  # it may have been waiting for just that
            yield {"part": "failed", "step": name, "error": "no time was left for it"}
            continue
        except Exception as error:  # the other ways are measured all the same
            yield _failed(name, error)
            continue
        steps[name] = step
        yield part
        if part.get("graphs") == 0:
            yield {"part": "failed", "step": name, "error": "it ran what was compiled before"}
        if device == "cuda" and WAYS[name].is_ours and not part["choices"]["made"]:
            yield {"part": "failed", "step": name, "error": "no convolution was served by us"}
    replays: dict[str, Callable[[], None]] = dict(steps)
    memory: dict[str, int] = {}
    called: list[str] = list(steps)
    if device == "cuda":
        pool = torch.cuda.graph_pool_handle()
        for name, step in steps.items():
            try:
                memory[name] = step.peak_bytes()
                replays[name] = step.captured(pool)
                called.remove(name)
            except Exception as error:
                yield _failed(f"{name}: capture", error)
    results: dict[str, dict[str, Tensor]] = {}
    for name, replay in replays.items():
        replay()
        synchronize(device)
        results[name] = steps[name].results()
    if replays:
        counts = calibrate(replays, request["block_ms"], request["settle_s"], device)
        times = take_turns(replays, counts, request["rounds"], device)
        yield {
            "part": "turns",
            "times_ms": {name: numbers.all_significant(found) for name, found in times.items()},
            "steps_a_block": counts,
            "peak_bytes": memory,
            "by_calls": called,
            "parameters": subject.parameters,
            "input_shape": list(subject.inputs[0].shape[1:]),
        }
        if device == "cuda" and request["kernels"]:
            yield {"part": "kernels", "kernels": _kernels(replays, request["kernels"])}
    if results:
        yield compared(results, subject.reference(batch))


def _kernels(replays: dict[str, Callable[[], None]], most: int) -> dict[str, Any]:
    """Returns the number of all kernels of a step, their milliseconds, and the longest, by way."""
    found: dict[str, Any] = {}
    for name, replay in replays.items():
        kernels = profiled.kernels_of(replay)
        found[name] = {
            "launches": sum(kernel.launches for kernel in kernels),
            "ms": numbers.significant(sum(kernel.ms for kernel in kernels), 4),
            "longest": [
                [kernel.name[:_NAME], kernel.launches, numbers.significant(kernel.ms, 4)]
                for kernel in kernels[:most]
            ],
        }
    return found


def _begun(request: dict[str, Any], lock: GpuLock) -> Subject:
    """The subject; PyTorch's compiler is loaded, so that no first step pays for it."""
    if request["device"] == "cuda":
        # All on the stream that is captured: autograd's nodes remember theirs.
        torch.cuda.set_stream(torch.cuda.Stream())
    dtype = getattr(torch, request["dtype"])
    case, batch = Case(**request["case"]), max(request["batches"])
    subject = Subject(case, batch, request["device"], dtype)
    if any(WAYS[name].compile is not None for name in request["ways"]):
        x = torch.randn(1, 3, 8, 8).to(subject.inputs[0])
        with torch.no_grad(), lock.lent_while_compiling():
            torch.compile(nn.Conv2d(3, 8, 3).to(x), dynamic=False)(x)
    return subject


def _first_step(
    subject: Subject, name: str, batch: int, lock: GpuLock, compiles_anew: bool
) -> tuple[Step, Part]:
    """A way's step, which has run once; how long that took, if all of it was compiled for it:
    compiling, tuning, and running."""
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    way = WAYS[name]
    graphs, known = counters["stats"]["unique_graphs"], len(ca.compilations())
    synchronize(subject.device)
    begin = time.perf_counter() - lock.waited_s
    may_lend = nullcontext() if way.times_while_compiling else lock.lent_while_compiling()
    mending = inductor_layout.mended() if way.mends else nullcontext()
    # Kept until the run ends: a graph may be compiled by a later step.
    cold = fresh_cache(dir=cache_dir(), delete=False) if compiles_anew else nullcontext()
    with config.patch(freezing=way.freezing), mending, cold, may_lend:
        step = subject.step(way, batch)
        step()
    synchronize(subject.device)
    took_s = time.perf_counter() - lock.waited_s - begin
    part: Part = {"part": "way", "way": name}
    if compiles_anew:
        part["first_step_s"] = numbers.significant(took_s, 4)
    if way.compile is not None:
        part["graphs"] = counters["stats"]["unique_graphs"] - graphs
        if programs := ca.compilations()[known:]:
            part["programs"] = [_told(one) for one in programs]
    if way.settles:
        part |= _settled(step, subject.device)
    if way.is_ours:
        part["choices"] = choices_made()
    if step.layout:
        part["layout"] = step.layout
    return step, part


def _told(program: ca.Compilation) -> str:
    """A graph of the backend: which program runs in captures, its fused groups, the milliseconds of
    the GPU's part of each program, and what is noted."""
    times = "".join(f", {name}: {ms:.4g} ms" for name, ms in program.gpu_times_ms.items())
    fused = f"{len(program.fused)} of {len(program.groups)} groups fused"
    text = f"{program.chosen_in_captures}, {fused}{times}"
    return f"{text}: {program.note}"[:300] if program.note else text


def _settled(step: Step, device: str) -> Part:
    """Runs steps, each of which is waited for, as long as later calls decide."""
    from cudnn_autotune.online.tuner import TUNER

    steps_ms = []
    while TUNER.undecided and len(steps_ms) < SETTLING:
        begin = time.perf_counter()
        step()
        synchronize(device)
        steps_ms.append((time.perf_counter() - begin) * 1e3)
    return {
        "settling": {
            "steps": len(steps_ms),
            "undecided": TUNER.undecided,
            "longest_step_ms": numbers.significant(max(steps_ms, default=0.0), 4),
            "median_step_ms": numbers.significant(numbers.median(steps_ms or [0.0]), 4),
        }
    }


def compared(results: dict[str, dict[str, Tensor]], expected: dict[str, Tensor]) -> Part:
    """How far each way is off what float32 gives, and where one of ours is further off than
    PyTorch's are."""
    off = {name: errors(found, expected) for name, found in results.items()}
    theirs = [mine for name, mine in off.items() if not WAYS[name].is_ours]
    part: Part = {"part": "compared", "ways": {}}
    for name, mine in off.items():
        gradients = [error for key, error in mine.items() if key != "outputs"]
        ways: Part = {"outputs": numbers.significant(mine["outputs"], 3)}
        if gradients:
            ways["gradients"] = numbers.significant(numbers.median(gradients), 3)
        if WAYS[name].is_ours and theirs:
            # "not <=": a NaN is beyond.
            ways["beyond"] = [
                key
                for key, error in mine.items()
                if not error <= TIMES * max(other[key] for other in theirs) + MORE
            ]
        part["ways"][name] = ways
    return part


def _failed(step: str, error: BaseException) -> Part:
    return {
        "part": "failed",
        "step": step,
        "error": f"{type(error).__name__}: {error}".splitlines()[0][:300],
    }
