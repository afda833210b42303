"""The worker of lone_layer.py: the model with each mode's picks in it, then the layers alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import numbers
from common.network import build
from common.sources import GpuSource, SimulatedSource, Source, failure, fast_listed, select

import cudnn_autotune as ca
from lone import alone
from lone.watched import Training, Watch, Watched, portrait, watched

_TUNING_STEPS = 2
_WARM_STEPS = 3


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one ``inside`` record a mode and pass, then ``plain`` and ``queued`` ones; ``failed``
    for a step that failed: the others still count."""
    device = request["device"]
    end = time.monotonic() + request["seconds"]
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # for the layers that are not watched
    dtype = torch.float32 if device == "cpu" else getattr(torch, request["dtype"])
    watch = Watch(device)
    model = build(request["model"], device, dtype)
    try:
        groups = watched(model, request["layers"], watch)
    except ValueError as error:
        yield {"part": "failed", "step": "--layers", "error": failure(error)}
        return
    for layers in groups.values():
        for layer in layers:
            layer.judged = tuple(request["ops"])
    training = Training(model, request["shape"], device, dtype, watch)
    _set_sampling(groups, "heuristic")
    training.steps(_WARM_STEPS)
    watch.capturing = True
    training.steps(1)
    watch.capturing = False
    for name, held in watch.operands.items():
        yield {
            "part": "layer",
            "layer": name,
            "modules": len(groups[name]),
            "input_shape": list(held["x"].shape),
            "weight_shape": list(held["w"].shape),
            "operands": {key: portrait(data) for key, data in held.items()},
        }
    problems = {
        (name, op): _problem(groups[name][0], watch.operands[name], op)
        for name in watch.operands
        for op in request["ops"]
    }
    picks: dict[tuple[str, str], dict[str, str]] = {key: {} for key in problems}
    modes = request["modes"]
    for run, order in enumerate((modes, modes[::-1])):
        for mode in order:
            if time.monotonic() > end:
                break
            try:
                found = _inside(training, groups, mode, request)
            except Exception as error:  # the other modes still count
                yield {"part": "failed", "step": f"model with {mode}", "error": failure(error)}
                _forget_gradients(watch, model)
                continue
            for key in problems:
                if mode in picks[key]:
                    continue  # a choice stays
                text = _picked(problems[key], mode, device)
                if text is not None:
                    picks[key][mode] = text
            told = {f"{name}/{op}": picks[name, op].get(mode) for name, op in problems}
            yield {"part": "inside", "mode": mode, "run": run + 1, "picks": told, **found}
    # What is left of the model would hold memory, and nothing needs it any more.
    del training
    model.zero_grad(set_to_none=True)
    for (name, op), problem in problems.items():
        if time.monotonic() > end:
            yield {"part": "failed", "step": f"{name}/{op} alone", "error": "no time left"}
            continue
        layer, operands = groups[name][0], watch.operands[name]
        yield from _alone(layer, operands, problem, picks[name, op], request, end)


def _set_sampling(groups: dict[str, list[Watched]], mode: str) -> None:
    for layers in groups.values():
        for layer in layers:
            layer.sampling = mode


def _forget_gradients(watch: Watch, model: Any) -> None:
    watch.recording = False
    watch.spans.clear()
    with contextlib.suppress(RuntimeError):
        model.zero_grad(set_to_none=True)


def _inside(
    training: Training, groups: dict[str, list[Watched]], mode: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Times of the watched layers' calls in steps of the model, its queue filled."""
    watch = training.watch
    _set_sampling(groups, mode)
    training.steps(_TUNING_STEPS)  # a shape's first call tunes
    training.steps(_WARM_STEPS)
    # Of a single step: with more, CUDA's queue fills up and the host waits for the GPU.
    _, host_ms = training.steps(1)
    training.steps(request["warm_steps"])  # the clock of a model that has run for a while
    watch.recording = True
    steady_s = time.monotonic()
    step_ms, _ = training.steps(request["steps"])
    end_s = time.monotonic()
    watch.recording = False
    calls = {
        f"{name}/{op}": {k: numbers.significant(v) for k, v in numbers.spread(row).items()}
        for (name, op), row in watch.take().items()
    }
    return {
        "step_ms": numbers.significant(step_ms),
        "host_ms": numbers.significant(host_ms),
        "calls": calls,
        "begin_monotonic_s": steady_s,
        "end_monotonic_s": end_s,
    }


def _problem(layer: Watched, held: dict[str, torch.Tensor], op: str) -> ca.ConvProblem:
    x, w = held["x"], held["w"]
    last = x.is_contiguous(memory_format=torch.channels_last)
    return ca.ConvProblem(
        op,
        tuple(x.shape),
        tuple(w.shape),
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        dtype=x.dtype,
        memory_format=torch.channels_last if last else torch.contiguous_format,
        allow_tf32=torch.backends.cudnn.allow_tf32,
    )


def _picked(problem: ca.ConvProblem, mode: str, device: str) -> str | None:
    """What serves the problem in the model; in a dry run what the mode takes in a simulation."""
    if device == "cpu":
        text: str | None = select(SimulatedSource(), mode).text
        return text
    wanted = (problem.op, problem.input_shape, problem.weight_shape, problem.stride)
    for choice in ca.choices():
        p = choice.problem
        if choice.sampling == mode and wanted == (p.op, p.input_shape, p.weight_shape, p.stride):
            return choice.text
    return None


def _alone(
    layer: Watched,
    held: dict[str, torch.Tensor],
    problem: ca.ConvProblem,
    picks: dict[str, str],
    request: dict[str, Any],
    end: float,
) -> Iterator[dict[str, Any]]:
    case = f"{layer.group}/{problem.op}"
    device, reference = request["device"], request["reference"]
    try:
        layer.sampling = reference
        call = _call(layer, held, problem.op)
        call()  # it is tuned already, unless the model failed
        for row in alone.plain(call, request["iterations"], request["idle_s"], device):
            yield {"part": "plain", "case": case, "mode": reference, **row}
    except Exception as error:
        yield {"part": "failed", "step": f"{case} plain", "error": failure(error)}
    # Every engine that some mode took, the reference's first.
    texts = list(dict.fromkeys([picks[m] for m in (reference, *picks) if m in picks]))
    random = GpuSource(problem) if device == "cuda" else SimulatedSource()
    yield from _queued(case, "random", random, texts, request, end)
    if texts:
        # Copies: the one that the operation writes is overwritten.
        tensors = (held["x"].clone(), held["w"].clone(), held["g"].clone())
        own: Source = GpuSource(problem, tensors) if device == "cuda" else SimulatedSource()
        yield from _queued(case, "the model's", own, texts[:1], request, end)


def _queued(
    case: str,
    data: str,
    source: Source,
    texts: list[str],
    request: dict[str, Any],
    end: float,
) -> Iterator[dict[str, Any]]:
    from cudnn_autotune.audit.comparison import candidate_of

    timer = None
    try:
        timer, candidates = source.open()
        known = fast_listed(candidates, set(texts))
        for text in texts:
            if time.monotonic() > end:
                raise TimeoutError("no time left")
            try:
                candidate = candidate_of(text, known)
                if not timer.runnable([candidate]):
                    raise RuntimeError(f"{text} does not build, or its workspace cannot be had")
                found = alone.queued(
                    source,
                    timer,
                    candidate,
                    request["iterations"],
                    request["idle_s"],
                    request["steady_s"],
                )
            except Exception as error:  # the other engines still count
                yield {"part": "failed", "step": f"{case} {text}", "error": failure(error)}
                continue
            yield {"part": "queued", "case": case, "text": text, "data": data, **found}
    except Exception as error:
        yield {"part": "failed", "step": f"{case} on {data} operands", "error": failure(error)}
    finally:
        if timer is not None:
            with contextlib.suppress(RuntimeError):
                source.close(timer)


def _call(layer: Watched, held: dict[str, torch.Tensor], op: str) -> Any:
    x, w, g = held["x"], held["w"], held["g"]
    run = layer.op(op)
    if op == "fprop":
        return lambda: run(x, w)
    return (lambda: run(g, w, x.shape)) if op == "dgrad" else (lambda: run(g, x, w.shape))
