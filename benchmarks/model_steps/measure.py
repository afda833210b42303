"""The workers of models.py: they compile the ways of a case, and measure them in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import numbers
from common.choices import choices_made
from common.modes import set_torch_mode, synchronize
from torch import Tensor, nn

import cudnn_autotune as ca

from .cases import REFERENCE, WAYS, Case
from .subject import Step, Subject, errors
from .turns import calibrate, take_turns

Part = dict[str, Any]

# A way's relative error may be this many times that of PyTorch's layers, and this much more.
TIMES, MORE = 2.0, 1e-3
_COUNTED = ("fxgraph_cache", "autograd_cache")


def warm_up(request: dict[str, Any]) -> Iterator[Part]:
    """Compiles the ways of a case into Inductor's folder, while other processes do so beside it.

    What is compiled must be what the measuring process looks up: only the mode of sampling differs,
    which is no part of a graph while the layers leave it to the settings. Nothing that is timed
    here, beside other processes, may be kept: no engine is searched, and what Triton's tuner picks
    is not saved.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    # Of the same name: kernels are pickled with the method, which is looked up by name elsewhere.
    def save(*_: Any, **__: Any) -> None:
        pass

    AutotuneCache.save = save  # type: ignore[method-assign]
    ca.set_sampling("heuristic")
    subject = _begun(request)
    for name in WAYS:
        try:
            step, part = _first_step(subject, name, request["mode"])
            step()  # what compiles anew at its second call has done so
        except Exception as error:
            yield _failed(name, error)
            continue
        yield part
        del step
        gc.collect()


def measure(request: dict[str, Any]) -> Iterator[Part]:
    """The first step of each way, their steps in turns, and how far their results are off."""
    set_torch_mode(request["pytorch"])
    ca.set_sampling(request["sampling"])
    if request["store"] is not None:
        ca.set_store(request["store"], mode="read_write")
    subject = _begun(request)
    steps: dict[str, Step] = {}
    for name in WAYS:
        try:
            steps[name], part = _first_step(subject, name, request["mode"])
        except Exception as error:  # the other ways are measured all the same
            yield _failed(name, error)
            continue
        yield part
        if request["device"] == "cuda" and WAYS[name].is_ours and not part["choices"]["made"]:
            yield {"part": "failed", "step": name, "error": "no convolution was served by us"}
    device = request["device"]
    replays: dict[str, Callable[[], None]] = dict(steps)
    if device == "cuda":
        try:
            replays = {name: step.captured() for name, step in steps.items()}
        except Exception as error:  # all by plain calls: a graph would be ahead of them
            yield _failed("capture", error)
    results: dict[str, dict[str, Tensor]] = {}
    for name, replay in replays.items():
        replay()
        synchronize(device)
        results[name] = steps[name].results()
    if replays:
        yield _in_turns(replays, request) | {
            "replayed": "calls" if replays == steps else "CUDA graphs"
        }
    yield compared(results, subject.reference())


def _begun(request: dict[str, Any]) -> Subject:
    """The subject; PyTorch's compiler and cuDNN are loaded, so that no first step pays for it."""
    import torch._inductor.config as inductor

    if request["device"] == "cuda":
        # All on the stream that is captured: autograd's nodes remember theirs.
        torch.cuda.set_stream(torch.cuda.Stream())
    case = Case(**request["case"])
    inductor.freezing = case.step == "infer_frozen"
    subject = Subject(case, request["shape"], request["device"])
    tiny = nn.Conv2d(3, 8, 3).to(request["device"], subject.images.dtype)
    with torch.no_grad():
        torch.compile(tiny, dynamic=False)(subject.images[:1, :, :8, :8].contiguous())
    synchronize(request["device"])
    return subject


def _first_step(subject: Subject, name: str, mode: str) -> tuple[Step, Part]:
    """A way's step, which has run once; how long that took: compiling, tuning, and running."""
    from torch._dynamo.utils import counters

    counters.clear()
    synchronize(subject.device)
    begin = time.perf_counter()
    step = subject.step(WAYS[name], mode)
    step()
    synchronize(subject.device)
    part: Part = {
        "part": "way",
        "way": name,
        "first_step_s": numbers.significant(time.perf_counter() - begin, 4),
        "caches": {
            key: count
            for group in ("inductor", "aot_autograd")
            for key, count in counters[group].items()
            if key.startswith(_COUNTED)
        },
    }
    if WAYS[name].is_ours:
        part["choices"] = choices_made()
    return step, part


def _in_turns(replays: dict[str, Callable[[], None]], request: dict[str, Any]) -> Part:
    device = request["device"]
    counts = calibrate(replays, request["block_ms"], request["settle_s"], device)
    times = take_turns(replays, counts, request["rounds"], device)
    return {
        "part": "turns",
        "times_ms": {name: numbers.all_significant(found) for name, found in times.items()},
        "steps_a_block": counts,
    }


def compared(results: dict[str, dict[str, Tensor]], expected: dict[str, Tensor]) -> Part:
    """How far each way is off what float32 gives, and where one is further off than PyTorch's
    layers are."""
    off = {name: errors(found, expected) for name, found in results.items()}
    part: Part = {"part": "compared", "ways": {}}
    for name, mine in off.items():
        gradients = [error for key, error in mine.items() if key != "outputs"]
        ways: Part = {"outputs": numbers.significant(mine["outputs"], 3)}
        if gradients:
            ways["gradients"] = numbers.significant(numbers.median(gradients), 3)
        if name != REFERENCE and REFERENCE in off:
            theirs = off[REFERENCE]
            # "not <=": a NaN is beyond.
            ways["beyond"] = [
                key for key, error in mine.items() if not error <= TIMES * theirs[key] + MORE
            ]
        part["ways"][name] = ways
    return part


def _failed(step: str, error: BaseException) -> Part:
    return {
        "part": "failed",
        "step": step,
        "error": f"{type(error).__name__}: {error}".splitlines()[0][:300],
    }
