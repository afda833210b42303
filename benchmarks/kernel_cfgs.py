#!/usr/bin/env python
"""Which kernels of cuDNN's run-time-compiled engines are worth compiling?

cuDNN offers one kernel (KERNEL_CFG) of each such engine; it has some fifty, each 0.3 s of a core
to compile, and another one is often faster. On each layer: all of them are built, called twice
each, and the fastest take turns with the fastest configs that cuDNN lists. The report is the
portfolio: the few kernels that come near the best of all (cudnn_autotune/engines/unlisted.py ships
them).

    python benchmarks/kernel_cfgs.py --json kernel_cfgs.json --plot kernel_cfgs.png
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, ending, numbers

# Which engine computes what: Hopper's, in cuDNN 9.
ENGINES = {"dgrad": 78, "wgrad": 70, "fprop": 71}
DEFAULT_LAYERS = (
    "resnet50_layer3_3x3",
    "resnet50_layer1_1x1",
    "sd_unet_down_640",
    "resnet50_layer1_3x3",
    "efficientnetv2_s_stage6_expand",
    "vgg16_conv3_2",
)
LIKELY_S = 4.0  # what a layer in one direction may take, until one has been measured


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--layers", default=",".join(DEFAULT_LAYERS), help="of layers.json; %(default)s")
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    p.add_argument("--ops", default=",".join(ENGINES), help="of: %(default)s")
    p.add_argument("--values", type=int, default=56, help="KERNEL_CFG below this are tried")
    p.add_argument("--rounds", type=int, default=8, help="a multiple of 4; %(default)s")
    p.add_argument("--time-limit", type=float, default=45, help="seconds for all of it, about")
    return p


def wanted(names: str, dtype: str, ops: list[str]) -> list[Any]:
    """Layer by layer, so that a time limit cuts off layers and not engines."""
    from cudnn_autotune.audit.layers import Case, load

    known = {(c.layer, c.op): c for c in load(Path(__file__).with_name("layers.json"))}
    layers = {layer for layer, _ in known}
    found = []
    for name in (name.strip() for name in names.split(",")):
        if name not in layers:
            sys.exit(f"--layers: {name!r} is not a layer of layers.json")
        for op in ops:
            case = known.get((name, op))
            if case is None:
                continue  # nobody needs this layer in this direction
            fields = {k: getattr(case, k) for k in case.__dataclass_fields__}
            found.append(Case(**{**fields, "dtype": dtype}))
    return found


def main() -> int:
    options = parser().parse_args()
    ops = [op.strip() for op in options.ops.split(",")]
    if unknown := [op for op in ops if op not in ENGINES]:
        sys.exit(f"--ops: {unknown} unknown; allowed: {', '.join(ENGINES)}")
    if options.values < 1:
        sys.exit(f"--values must be 1 or more, got {options.values}")
    if options.rounds < 4 or options.rounds % 4:
        sys.exit(f"--rounds must be a multiple of 4, got {options.rounds}")
    if not options.time_limit > 0:
        sys.exit(f"--time-limit must be above 0, got {options.time_limit}")
    cases = wanted(options.layers, options.dtype, ops)
    import torch
    from common.record import Record
    from common.sources import GpuSource, failure
    from common.telemetry import Telemetry
    from kernel_portfolio.measure import Settings, measure
    from kernel_portfolio.report import plot, tables
    from kernel_portfolio.simulated import SimulatedKernels

    from cudnn_autotune import _C
    from cudnn_autotune.engines.unlisted import kernel_cfgs

    is_dry_run = options.device == "cpu"
    if not is_dry_run and not torch.cuda.is_available():
        sys.exit("--device: there is no CUDA GPU here; --device cpu is a dry run")
    begin = time.monotonic()
    settings = Settings(values=options.values, rounds=options.rounds)
    record = Record("kernel_cfgs", options.json, device=options.device, arguments=vars(options))
    measured = record.results["measured"] = []
    failures = record.results["failures"] = []
    took_s: list[float] = []
    with Telemetry() as telemetry:
        for index, case in enumerate(cases):
            start = time.monotonic()
            likely = max(took_s[-3:], default=LIKELY_S)
            if start - begin + likely > options.time_limit:
                failures.append(f"time limit: {len(cases) - index} of {len(cases)} not measured")
                break
            engine = ENGINES[case.op]
            problem = case.problem()
            source = SimulatedKernels(engine, index) if is_dry_run else GpuSource(problem)
            shipped = kernel_cfgs(_C.cudnn_runtime_version()).get(engine, ())
            timer = None
            try:
                timer, candidates = source.open()
                found = measure(timer, candidates, engine, always=shipped, settings=settings)
            except (RuntimeError, ValueError) as error:
                failures.append(f"{case.id}: {failure(error)}")
                print(failures[-1], file=sys.stderr)
            else:
                known = {"layer": case.layer, "op": case.op, "engine": engine}
                measured.append({**known, "shipped": list(shipped), **found})
            finally:
                if timer is not None:
                    source.close(timer)
            took_s.append(time.monotonic() - start)
            print(f"{case.id}: {took_s[-1]:.1f} s", file=sys.stderr, flush=True)
            record.save(telemetry=telemetry.summary())
    record.results["seconds"] = numbers.all_significant(took_s, 3)
    complete = len(measured) == len(cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
