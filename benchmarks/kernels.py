#!/usr/bin/env python
"""Where cuDNN is far from the roofline: how fast are the implementations beside it?

For each layer of benchmarks/kernels.json, `race` times all candidates. Then finalists take turns
with cold and hot caches: the fastest of cuDNN, PyTorch's own path and cuBLAS, the fastest of each
other implementation, and the Triton template of Inductor's max-autotune, if any. Each output is
checked first.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --cases convnext,stride2 --no-inductor
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import arguments, cases, engines, investigation
from common.numbers import geometric_mean
from common.tables import Table, columns, number

LAYERS = Path(__file__).with_name("kernels.json")
ROUNDS, BATCH_MS = 15, 1.0
INDUCTOR = "inductor"


def kind_of(problem: Any) -> str:
    """The kind of layer that a summary counts the problem as."""
    kernel, groups = problem.weight_shape[2:], problem.groups
    if groups > 1 and problem.weight_shape[1] == 1:
        if max(problem.stride) > 1:
            return "depthwise, strided"
        if max(kernel) >= 130:
            return "depthwise, long filters"
        return "depthwise, 7 and wider" if max(kernel) >= 7 else "depthwise, narrower"
    if groups > 1:
        return "grouped, long filters" if math.prod(kernel) >= 16 else "grouped"
    if problem.stride == kernel and max(kernel) > 1:
        return "patches"
    if problem.input_shape[1] <= 8:
        return "first layer, 3-d" if len(kernel) == 3 else "first layer"
    if problem.weight_shape[0] <= 8:
        return "last layer"
    if max(kernel) == 1:
        return "1x1, strided"
    channels = (problem.input_shape[1], problem.weight_shape[0])
    if any(number % 8 for number in channels):
        return "odd channels"
    return "few filters" if min(channels) <= 64 else "others"


def family_of(text: str) -> str:
    """Returns the family of a candidate, which has one place in the final turns: "" for cuDNN,
    PyTorch's own path and cuBLAS."""
    return text.partition("@")[0] if "@" in text else ""


def inductor_plan(problem: Any, operands: Any) -> Any:
    """Returns a plan that calls Inductor's best template; None if Inductor has none. It allocates
    its result, as users' calls do."""
    import torch
    from torch._inductor import config

    from cudnn_autotune.engines.recipe import PythonLaunch, Recipe
    from cudnn_autotune.engines.recipe_plan import recipe_plan

    if problem.op != "fprop" or problem.groups > 1 or problem.spatial_dims != 2:
        return None
    n = problem.spatial_dims
    geometry = (problem.stride, problem.padding[:n], problem.dilation)

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, None, *geometry)

    with config.patch(max_autotune_conv_backends="TRITON"):
        compiled = torch.compile(convolution, mode="max-autotune-no-cudagraphs", dynamic=False)
        compiled(*operands[:2])

    def launch(x: torch.Tensor, w: torch.Tensor, *_: torch.Tensor) -> None:
        compiled(x, w)

    return recipe_plan(problem, INDUCTOR, Recipe((PythonLaunch(launch),)), operands[0].device.index)


def in_turns(timer: Any, finalists: list[Any]) -> dict[str, float]:
    """Microseconds of a call, by text: the mean of the medians with cold and with hot caches."""
    from cudnn_autotune.timers.timer import Batch

    once = timer.run([Batch(c, 1, "hot") for c in finalists for _ in range(2)])
    for candidate, sample in zip(finalists, once[1::2], strict=True):
        if sample.error:
            raise RuntimeError(f"{candidate.text}: {sample.error}")
    calls = [max(2, round(BATCH_MS / sample.time_ms)) for sample in once[1::2]]
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for cache in ("cold", "hot"):
            batches = [Batch(c, n, cache) for c, n in zip(finalists, calls, strict=True)]
            for batch, sample in zip(batches, timer.run(batches), strict=True):
                times.setdefault((batch.candidate.text, cache), []).append(sample.time_ms)
    medians = {key: 1e3 * statistics.median(found) for key, found in times.items()}
    return {
        c.text: statistics.mean(medians[c.text, cache] for cache in ("cold", "hot"))
        for c in finalists
    }


def measure(
    wanted: dict[str, Any], peaks: Any, has_inductor: bool, name: str, failures: list[str]
) -> Iterator[investigation.Row]:
    import torch

    from cudnn_autotune.engines import roofline
    from cudnn_autotune.engines.configs import Candidate
    from cudnn_autotune.timers.measuring import operands
    from cudnn_autotune.tuning.checking import OutputChecks

    problem = wanted[name].problem()
    with engines.opened(problem) as (timer, candidates):
        best: dict[str, Any] = {}
        for candidate in engines.ranked(timer, candidates):
            best.setdefault(family_of(candidate.text), candidate)
        data = operands(problem, torch.device("cuda", torch.cuda.current_device()))
        checks = OutputChecks()
        for candidate in list(best.values()):
            plan = timer.plans[candidate.text]
            if not checks.is_right(problem, candidate.text, plan, data):
                failures.append(f"{name}: {candidate.text} is wrong")
                del best[family_of(candidate.text)]
        if has_inductor and (plan := inductor_plan(problem, data)) is not None:
            timer.plans[INDUCTOR] = plan
            best[INDUCTOR] = Candidate(None, {}, 0, (), (), INDUCTOR, "", 0)
        times = in_turns(timer, list(best.values()))
    by_inductor = times.pop(INDUCTOR, None)
    before = best.pop("")
    best.pop(INDUCTOR, None)
    beside = min((c.text for c in best.values()), key=times.__getitem__, default=None)
    limit_us = 1e3 * roofline.limit(problem, peaks).limit_ms
    yield {
        "kind": kind_of(problem),
        "op": problem.op,
        "before": before.text,
        "before (us)": times[before.text],
        "beside cuDNN": beside,
        "beside (us)": beside and times[beside],
        "times as fast": beside and times[before.text] / times[beside],
        "Inductor (us)": by_inductor,
        "limit (us)": limit_us,
        "before / limit": times[before.text] / limit_us,
        "beside / limit": beside and times[beside] / limit_us,
    }


def tables(data: dict[str, Any]) -> list[Any]:
    """A summary by kind, in which a layer counts with the faster of both, and all layers."""
    header = columns("kind|op|layers|times as fast: geometric mean|least|most|won")
    summary = Table("What implementations beside cuDNN's engines gain", header)
    groups: dict[tuple[str, str], list[float]] = {}
    for row in data["results"]["rows"]:
        groups.setdefault((row["kind"], row["op"]), []).append(row["times as fast"] or 0.0)
    for (kind, op), found in sorted(groups.items()):
        gains = [max(1.0, ratio) for ratio in found]
        won = sum(ratio > 1 for ratio in found)
        shown = (geometric_mean(gains), min(gains), max(gains))
        cells = (number(value) for value in shown)
        summary.rows.append([kind, op, str(len(found)), *cells, str(won)])
    return [summary, *investigation.tables(data)]


def main() -> int:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument("--time-limit", type=float, default=500, help="seconds; no case begins later")
    p.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--dtypes", help="comma-separated; all of the list without it")
    cases.add_options(p, ("/",))
    p.set_defaults(layers=LAYERS)
    options = p.parse_args()
    wanted = {case.id: case for case in cases.wanted(options.layers, options.cases)}
    if options.dtypes:
        known = {case.dtype for case in wanted.values()}
        dtypes = arguments.some_of("--dtypes", options.dtypes, known)
        wanted = {id: case for id, case in wanted.items() if case.dtype in dtypes}
    arguments.check_gpu(__file__)
    import torch

    from cudnn_autotune.timers import peaks

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = True
    measured = partial(measure, wanted, peaks.measure(), options.inductor)
    return investigation.fill(__file__, options, list(wanted), measured, "Each layer")


if __name__ == "__main__":
    sys.exit(main())
