#!/usr/bin/env python
"""Why does a layer alone take another time than in its model? (docs/findings/layer-in-its-model.md)

A network trains in half precision, channels_last. The forward calls of a layer, and of those of its
stage that are alike, are timed by CUDA events while each mode's pick serves them. Then the layer is
called alone on the operands that the model gave it: 1, 10, 100 and 1000 times from an idle GPU, as
a short script would, and for half a second behind a queue that is always full.

    python benchmarks/lone_layer.py --json lone_layer.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

CASES = ("layer2.1.conv2", "layer3.1.conv2")  # modules of the model
MODEL, BATCH = "resnet50", 64
MODES = ("heuristic", "sample_once", "race", "sustained", "auto")
WARM_STEPS, STEPS = 10, 20
CALLS = (1, 10, 100, 1000)
IDLE_S, STEADY_S = 0.8, 0.5


def alike(model: Any, name: str) -> list[Any]:
    """The layers of the named one's stage that have its configuration, itself included.

    Raises:
        ValueError: the model has no such convolution.
    """
    from torch import nn

    modules = dict(model.named_modules())
    layer = modules.get(name)
    if not isinstance(layer, nn.Conv2d):
        raise ValueError(f"{MODEL} has no Conv2d {name!r}")
    stage = name.split(".")[0]
    found = [m for n, m in modules.items() if n.split(".")[0] == stage and str(m) == str(layer)]
    return [m for m in found if m.weight.shape == layer.weight.shape]


def measure(name: str) -> Iterator[investigation.Row]:
    import torch
    from common.network import LOSS_SCALE, build, convert

    torch.backends.cudnn.benchmark = True
    model = build(MODEL, "cuda", torch.float16)
    convert(model, "heuristic")
    x = torch.randn(BATCH, 3, 224, 224, device="cuda").half()
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,), device="cuda")
    layers = alike(model, name)
    spans: list[tuple[Any, Any]] = []
    given: list[Any] = []

    def before(layer: Any, inputs: Any) -> None:
        given[:] = [inputs[0].detach().clone()]
        spans.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        spans[-1][0].record()

    def steps(count: int) -> None:
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(x).float(), labels)
            (loss * LOSS_SCALE).backward()
        torch.cuda.synchronize()

    for mode in MODES:
        for layer in layers:
            layer.sampling = mode
        steps(WARM_STEPS)
        spans.clear()
        hooks = []
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(before))
            hooks.append(layer.register_forward_hook(lambda *_: spans[-1][1].record()))
        steps(STEPS)
        for hook in hooks:
            hook.remove()
        inside_ms = statistics.median(begin.elapsed_time(end) for begin, end in spans)
        row: investigation.Row = {"mode": mode, "in the model (us)": 1e3 * inside_ms}
        for count in CALLS:
            row[f"alone, {count} (us)"] = 1e3 * alone_ms(layers[0], given[0], count)
        choice = chosen(mode, tuple(given[0].shape), tuple(layers[0].weight.shape))
        row["behind a full queue, random operands (us)"] = 1e3 * queued_ms(choice, inside_ms)
        yield {**row, "engine": choice.text}


def alone_ms(layer: Any, x: Any, count: int) -> float:
    """What a short script reads: GPU time between two events around ``count`` calls, a call."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    time.sleep(IDLE_S)
    with torch.no_grad():
        begin.record()
        for _ in range(count):
            layer(x)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def chosen(mode: str, input_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> Any:
    """The mode's newest ``Choice`` for the forward of such a layer."""
    import cudnn_autotune as ca

    shapes = (input_shape, weight_shape)
    return next(
        choice
        for choice in reversed(ca.choices())
        if (choice.sampling, choice.problem.op) == (mode, "fprop")
        and (choice.problem.input_shape, choice.problem.weight_shape) == shapes
    )


def queued_ms(choice: Any, about_ms: float) -> float:
    """A call in the last third of half a second behind a full queue."""
    from cudnn_autotune.timers.timer import Batch

    with engines.opened(choice.problem) as (timer, candidates):
        known = [*candidates.all(), *candidates.beyond()]
        picked = timer.runnable([c for c in known if c.text == choice.text])[0]
        timer.run([Batch(picked, 1, "hot")] * 2)
        batches = max(4, int(STEADY_S * 1e3 / (100 * about_ms)))
        samples = timer.run([Batch(picked, 100, "hot")] * batches)
    return statistics.fmean(sample.time_ms for sample in samples[-len(samples) // 3 :])


if __name__ == "__main__":
    title = f"Forward calls of layers of {MODEL}, in the model and alone"
    sys.exit(investigation.run(__file__, __doc__, CASES, measure, title, are_layers=False))
