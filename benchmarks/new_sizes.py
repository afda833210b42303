#!/usr/bin/env python
"""What do changing sizes cost: images of random sizes through a detector's backbone?

Each way has a process of its own, and runs the same sizes in the same order; each of the `--calls`
calls is waited for. The first way is PyTorch with benchmark off, and the total of each is put over
its. Then all sizes come once more. Last, the latest are captured into CUDA graphs, which take
turns with graphs of the same model whose convolutions are all tuned, by mode `--tuned` in the first
process. No process finds kernels compiled. A size that is not among them comes first, by the
heuristics, and is not counted: it loads libraries.

With `--op` lone layers, or norms, replace the model. Each has met `--measured` sizes, and then
meets `--sizes` in all, near and far ones by turns. At each its GPU time is divided by that of
PyTorch's own path. The rule: 1.02 in sum at most, and no size above 1.15.

    python benchmarks/new_sizes.py --json new_sizes.json
    python benchmarks/new_sizes.py --op forward --json new_sizes_layers.json
    python benchmarks/new_sizes.py --op batch_norm --json new_sizes_norms.json
    python benchmarks/new_sizes.py --ways pytorch_off,online --calls 50 --sizes 60
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import arguments, investigation, numbers

REFERENCE = "pytorch_off"
# Our ways: the sampling mode, and what new shapes are served by.
OURS = {
    "online": ("auto", "online"),
    "neighbour": ("auto", "neighbour"),
    "online_mode": ("online", "online"),
    "tune": ("auto", "tune"),
}
WAYS = (REFERENCE, "online", "neighbour", "online_mode", "pytorch_on_10", "tune")
BLOCK_MS, ROUNDS = 10.0, 8


def sizes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Heights and widths: multiples of 32 from 480 to 1344 pixels; small ones for a dry run."""
    step, low, high = (8, 2, 6) if options.device == "cpu" else (32, 15, 42)
    draw = partial(random.Random(0).randint, low, high)
    return [(step * draw(), step * draw()) for _ in range(options.sizes)]


def resident_mib() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: the milliseconds of each call, and by how much host memory has grown, size by
    size; what was chosen for them; then the time of each of the last sizes over its time tuned."""
    import torch
    from common.modes import set_torch_mode, synchronize
    from common.network import build
    from models.turns import calibrate, take_turns

    import cudnn_autotune as ca

    torch.manual_seed(0)
    way, device = request["way"], request["device"]
    dtype = torch.float32 if device == "cpu" else torch.float16
    plain = build(request["model"], device, dtype)
    model = copy.deepcopy(plain.eval())
    if way in OURS:
        ca.convert(model)
    else:
        set_torch_mode(way)
    like: Any = ca.sampling.get(request["tuned"])
    ca.sampling.register(dataclasses.replace(like, name="tuned"))
    tuned = ca.convert(plain, "tuned")
    pool: list[Any] = []

    def image(height: int, width: int) -> Any:
        x = torch.randn(request["batch"], 3, height, width, device=device)
        return x.to(dtype).contiguous(memory_format=torch.channels_last)

    def step(of: Any, x: Any) -> None:
        y = of(x)
        if request["train"]:
            torch.autograd.grad(y.float().sum(), list(of.parameters()))

    def once(x: Any) -> float:
        synchronize(device)
        begin = time.perf_counter()
        step(model, x)
        synchronize(device)
        return (time.perf_counter() - begin) * 1e3

    def replay(of: Any, x: Any) -> Any:
        step(of, x)
        synchronize(device)
        if device == "cpu":
            return lambda: step(of, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool[0] if pool else None):
            step(of, x)
        pool.append(graph.pool())  # all use one: nothing of a graph is needed after its turn
        return graph.replay

    with torch.set_grad_enabled(request["train"]):
        ca.set_sampling("heuristic")
        step(model, image(*request["first"]))
        ca.forget()
        mode, policy = OURS.get(way, ("auto", "tune"))
        ca.set_sampling(mode)
        ca.set_new_shapes(policy)
        end = time.monotonic() + request["seconds"]
        resident = resident_mib()
        met: list[tuple[int, int]] = []
        for height, width in request["sizes"]:
            x, calls_ms = image(height, width), []
            met.append((height, width))
            for _ in range(request["calls"]):
                calls_ms.append(once(x))
            grown = max(0.0, resident_mib() - resident)
            yield {"ms": numbers.all_significant(calls_ms), "grown_mib": grown}
            if time.monotonic() > end:
                break
        for height, width in met:
            yield {"again_ms": numbers.significant(once(image(height, width)))}
        made = Counter("measured" if c.total_samples else c.origin for c in ca.choices())
        yield {"made": made}
        # All are captured before any is tuned, which would change what serves its neighbours.
        images = {tuple(size): image(*size) for size in request["last"]}
        served = {size: replay(model, x) for size, x in images.items()}
        ca.set_store(request["store"], mode="read_write")
        for size, x in images.items():
            replays = {"served": served[size], "tuned": replay(tuned, x)}
            counts = calibrate(replays, BLOCK_MS, 0.05, device)
            times = take_turns(replays, counts, ROUNDS, device)
            over = [a / b for a, b in zip(times["served"], times["tuned"], strict=True)]
            yield {"size": size, "over": numbers.significant(numbers.median(over))}


def of_layers(options: argparse.Namespace) -> int:
    """Fills the record of lone layers."""
    from auto_against_pytorch import changing
    from common.modes import set_torch_mode

    import cudnn_autotune as ca

    ca.set_store(mode="off")
    set_torch_mode(REFERENCE)
    found = changing.layers(options.op, options.device == "cpu")
    each = max(1, options.sizes // len(found))

    def row(name: str, failures: list[str]) -> Iterator[investigation.Row]:
        yield changing.row(found[name], options.measured, each, options.device)

    title = f"Random sizes of lone layers, {options.op}, GPU time over PyTorch's own path"
    return investigation.fill(__file__, options, list(found), row, title)


def main() -> int:
    p = arguments.parser(__doc__)
    ops = ("forward", "dgrad", "wgrad", "batch_norm", "group_norm", "instance_norm")
    p.add_argument("--op", choices=ops, help="of lone layers")
    p.add_argument("--measured", type=int, default=10, help="a layer's earlier sizes (%(default)s)")
    p.add_argument("--ways", default=",".join(WAYS), help="%(default)s")
    p.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--train", action="store_true", help="forward and backward")
    p.add_argument("--sizes", type=int, default=200, help="how many (%(default)s)")
    p.add_argument("--calls", type=int, default=1, help="of each size (%(default)s)")
    p.add_argument("--last", type=int, default=50, help="of the sizes are compared (%(default)s)")
    p.add_argument("--tuned", default="auto", help="the mode that they are compared with")
    p.add_argument("--seconds", type=float, default=150, help="after which a way meets no size")
    p.add_argument("--time-limit", type=float, default=1500, help="seconds; no way begins later")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    options = p.parse_args()
    from common.workers import records_of, serve, start

    if options.worker:
        return serve(measure)
    arguments.check_least(options, batch=1, sizes=1, calls=1, last=1, measured=1)
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    if options.op:
        return of_layers(options)
    ways = arguments.some_of("--ways", options.ways, WAYS)
    if ways[0] != REFERENCE:
        sys.exit(f"--ways must begin with {REFERENCE}, which the others are compared with")
    arguments.some_of("--tuned", options.tuned, ("auto", "race"))
    drawn = sizes(options)
    reference: list[float] = []
    last = list(dict.fromkeys(drawn[-options.last :]))

    def row(way: str, failures: list[str]) -> Iterator[investigation.Row]:
        request = {**vars(options), "json": None, "way": way, "store": folder, "sizes": drawn}
        request |= {"last": last, "first": [max(map(max, drawn)) + 64] * 2}
        with contextlib.closing(start(__file__, way)) as worker:
            found = list(records_of(worker, request, 4 * options.seconds, failures))
        by_size = [entry["ms"] for entry in found if "ms" in entry]
        grown = [entry["grown_mib"] for entry in found if "ms" in entry]
        over = {tuple(entry["size"]): entry["over"] for entry in found if "over" in entry}
        if way == REFERENCE:
            reference[:] = map(sum, by_size)
            last[:] = over  # what the first process has tuned
        totals = [sum(calls) for calls in by_size]
        again = [entry["again_ms"] for entry in found if "again_ms" in entry]
        made = next((entry["made"] for entry in found if "made" in entry), {})
        yield {
            "total (s)": sum(totals) / 1e3,
            "first ten sizes (s)": sum(totals[:10]) / 1e3,
            "over benchmark off": sum(totals) / sum(reference[: len(totals)]),
            "sizes": len(totals),
            "longest call (ms)": max(map(max, by_size)),
            "longest of the last half (ms)": max(map(max, by_size[len(by_size) // 2 :])),
            "met again, median (ms)": numbers.median(again) if again else None,
            "measured": made.get("measured", 0),
            "by a neighbour": made.get("neighbour", 0),
            "host memory, ten sizes (MiB)": grown[:10][-1],
            "host memory (MiB)": grown[-1],
            "last sizes over tuned": numbers.geometric_mean(over.values()) if over else None,
            "compared": len(over),
        }

    what = f"batch {options.batch}, " + ("forward and backward" if options.train else "inference")
    title = f"{options.sizes} random sizes through {options.model}, {what}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return investigation.fill(__file__, options, ways, row, title)


if __name__ == "__main__":
    sys.exit(main())
