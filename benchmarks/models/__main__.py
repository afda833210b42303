#!/usr/bin/env python
"""How fast are whole models with our convolutions, next to PyTorch's, eager and compiled?

A case is a model, a step (inference in a half type; training in bfloat16 by autocast, forward and
backward; "optimize": then fused SGD with momentum), a layout of the model and its inputs, and a
batch. The ways to run it take turns in one process: their steps are captured in CUDA graphs by
`torch.cuda.graph`, and replayed block by block, ABBA in random order. A step that cannot be
captured is called instead, and marked.

PyTorch's   eager; compile: `torch.compile`; compile_frozen: with Inductor's freezing; compile_max:
            with max-autotune-no-cudagraphs; eager_last, compile_last: channels_last, whatever the
            case's layout; compile_mended: with a fault corrected that some versions of
            Inductor have in training (`models/inductor_layout.py`), else left out
ours        convert: `cudnn_autotune.convert(norms=False)` in eager, convert_last: to channels_last,
            convert_auto: with `memory_format="auto"` and this package's norms, convert_engines:
            without what computes convolutions beside cuDNN's engines, convert_race, convert_online
            and convert_sustained: by these modes, online after 500 steps or when it has decided,
            convert_norms: with this package's norms too, convert_last_norms: both in channels_last;
            backend: `torch.compile(backend="cudnn_autotune")` in its own form, backend_no_norms:
            with PyTorch's batch norms in training, backend_frozen: with frozen weights,
            backend_last: channels_last, backend_compare: in the faster of the first and Inductor's
            (in training, of the first and backend_no_norms), backend_auto: in the other layout too;
            compile_ours: `torch.compile` of a converted model

PyTorch keeps what `cudnn.benchmark` found for as long as a process lives, so each of its modes has
a process of its own: the first of `--pytorch` runs all ways, the others eager and convert, through
which their times are compared. No process tunes what an earlier one has chosen. `--at-once`
processes compile models and engines side by side, on the CPU; one at a time has the GPU, for
whatever runs on it. Cases are recorded as they end, larger batches first. Each way's first step
finds an empty cache of Inductor's. Shortly before a process must end, the way that it is at is
given up, and those that are ready take turns.

Outputs, and the gradients of the convolutions' weights, are compared with those of float32.

    python benchmarks/models --json models.json

What takes longest is tuning, so few batches and one of PyTorch's modes are the cheapest subset:

    python benchmarks/models --models resnet50,densenet121 --steps infer --batches largest \\
        --pytorch pytorch_on_10 --at-once 2 --time-limit 380 --json few.json

Decoders of images and videos are classes of diffusers with random weights: `wan_decode`, and
`encode` for the encoder, and `wan_decode_tiled`; likewise sd, flux, qwen, ltx, cogvideox, hunyuan.
Compiled ways compile the part that the class calls for each tile and each group of frames. Each
size of a tile, and each state of a cache of frames, is a graph: time is best limited for each way.

    python benchmarks/models --models wan_decode --steps infer --dtype bfloat16 --rounds 6 \\
        --layouts contiguous --ways eager,eager_last,convert_last,compile,backend \\
        --pytorch pytorch_on_10 --way-limit 100 --turns-s 40 --time-limit 480 --json wan.json

benchmarks/README.md says how to split a run over two GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments
from common.modes import OUR_MODES
from common.record import Record

from models.cases import (
    CAN_RUN,
    DEFAULT,
    EVERYWHERE,
    LAYOUTS,
    MODELS,
    PYTORCH,
    STEPS,
    WAYS,
    cases,
    part_of,
)

# The options that are passed to the workers.
ASKED = (
    *("device", "sampling", "rounds", "block_ms", "settle_s", "kernels"),
    *("dtype", "way_limit", "turns_s"),
)


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--models",
        default=",".join(MODELS),
        help="of this script, of torchvision, or else of timm; timm:NAME is timm's, and timm "
        "stands for twenty of them, decoders for those of diffusers; %(default)s",
    )
    p.add_argument(
        "--part",
        type=part,
        default="1/1",
        help="of the models: 2/5 is each fifth from the second",
    )
    p.add_argument("--steps", default="infer,train", help=f"%(default)s; of: {','.join(STEPS)}")
    p.add_argument("--layouts", default="channels_last", help="of: " + ",".join(LAYOUTS))
    p.add_argument(
        "--batches", type=batches, help="numbers, or largest or smallest of each model's; else all"
    )
    p.add_argument(
        "--ways", default=",".join(DEFAULT), help="%(default)s; of: " + ",".join(CAN_RUN)
    )
    p.add_argument("--pytorch", default=",".join(PYTORCH), help="of: %(default)s")
    p.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        default="float16",
        help="of inference; %(default)s",
    )
    p.add_argument("--sampling", choices=OUR_MODES, default="race", help="ours; %(default)s")
    p.add_argument("--rounds", type=int, default=20, help="blocks of each way; %(default)s")
    p.add_argument("--block-ms", type=float, default=20, help="length of a block; %(default)s")
    p.add_argument("--settle-s", type=float, default=0.5, help="in turns before the first block")
    p.add_argument(
        "--kernels", type=int, default=0, help="of each way's step, the longest; %(default)s"
    )
    p.add_argument("--at-once", type=int, default=5, help="processes; %(default)s")
    p.add_argument(
        "--store",
        type=Path,
        help="a folder that keeps choices for later runs; runs that share it share one GPU",
    )
    p.add_argument(
        "--inductor-cache",
        type=Path,
        help="a folder that keeps Inductor's programs for later runs: no first step is recorded",
    )
    p.add_argument(
        "--way-limit",
        type=float,
        default=900,
        help="seconds of each way's first step; %(default)s",
    )
    p.add_argument(
        "--turns-s",
        type=float,
        default=15,
        help="of a process, kept for capturing, turns and comparing; %(default)s",
    )
    p.add_argument("--process-limit", type=float, default=900, help="seconds; %(default)s")
    p.add_argument("--time-limit", type=float, default=3000, help="seconds for all; %(default)s")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def batches(text: str) -> list[int] | str:
    return text if text in ("largest", "smallest") else arguments.counts(text)


def part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be like 2/5, got {text!r}")
    return int(number), int(count)


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve

        from models.measure import measure

        return serve(measure)
    arguments.check_least(options, rounds=2, at_once=1)
    models = part_of([name.strip() for name in options.models.split(",")], options.part)
    steps = arguments.some_of("--steps", options.steps, STEPS)
    layouts = arguments.some_of("--layouts", options.layouts, LAYOUTS)
    ways = arguments.some_of("--ways", options.ways, CAN_RUN)
    modes = arguments.some_of("--pytorch", options.pytorch, PYTORCH)

    from models import report
    from models.phases import Run

    begin = time.monotonic()
    record = Record("models", options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text, record:
        folder = Path(text)
        store = options.store or folder / "store"
        store.mkdir(parents=True, exist_ok=True)
        cache = options.inductor_cache or folder / "inductor"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.absolute())
        requests: dict[str, dict[str, Any]] = {}
        for mode in modes:
            for case in cases(models, steps, layouts):
                asked = case.batches(options.batches)
                mine = [
                    name
                    for name in ways
                    if (mode == modes[0] or name in EVERYWHERE)
                    and (WAYS[name].trains if case.is_training else not WAYS[name].mends)
                ]
                if asked and mine:
                    requests[f"{mode}:{case.id}"] = {
                        **{name: getattr(options, name) for name in ASKED},
                        "case": dataclasses.asdict(case),
                        "batches": asked,
                        "ways": mine,
                        "pytorch": mode,
                        "compiles_anew": options.inductor_cache is None,
                        "lock": str(store / "gpu.lock"),
                        "store": str(store),
                    }
        limits = begin + options.time_limit, options.process_limit
        complete = Run(__file__, record, *limits).measure(requests, options.at_once)
    return record.end(complete, report.tables)


if __name__ == "__main__":
    sys.exit(main())
