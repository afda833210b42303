#!/usr/bin/env python
"""Do tunes of a model with empty stores agree, and are their steps equally fast?

Each tune has a fresh process, an empty store and no compiled kernels. `--by tune` calls
`cudnn_autotune.tune` before the first step; `first` lets the first step choose. Then one process
runs the model with the choices of each store, captured in CUDA graphs that take turns, beside
PyTorch's (benchmark off). A step in float16 (inference), or in bfloat16 by autocast (training).

Agreement: the share of pairs of tunes with the same candidate, on average over the problems.
Problems on which tunes differ go to standard error. `--against RECORD` is of the same command with
another version of the package.

    python benchmarks/repeated_tunes.py --json repeated_tunes.json
    python benchmarks/repeated_tunes.py --train --models resnet50,densenet121 \\
        --json repeated_tunes_train.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import arguments, investigation, numbers

MODELS = (
    "resnet50",
    "mobilenet_v3_large",
    "densenet121",
    "regnet_y_3_2gf",
    "convnext_tiny",
    "efficientnet_v2_s",
    "detector",
    "unet",
    "sd_unet",
    "sd_vae_decoder",
)
REFERENCE = "pytorch"
BLOCK_MS, SETTLE_S, ROUNDS = 20.0, 0.5, 16


def subject_of(request: dict[str, Any]) -> Any:
    """Returns the model with its inputs (``models.subject.Subject``), and the batch."""
    from models.cases import Case, takes_images
    from models.subject import Subject

    step = "train" if request["train"] else "infer"
    layout = "channels_last" if takes_images(request["model"]) else "contiguous"
    case = Case(request["model"], step, layout)
    asked = [request["batch"]] if request["batch"] else "largest"
    (batch,) = [2] if request["device"] == "cpu" else case.batches(asked)
    return Subject(case, batch, request["device"]), batch


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one tune, or with ``stores`` the steps by what these have."""
    yield compared(request) if request["stores"] else tuned(request)


def tuned(request: dict[str, Any]) -> dict[str, Any]:
    """Tunes the model; returns the choices by problem, and the cost."""
    from common.modes import synchronize
    from models.cases import WAYS

    import cudnn_autotune as ca

    ca.set_sampling(request["sampling"])
    ca.set_store(request["store"], mode="read_write")
    subject, batch = subject_of(request)
    step = subject.step(WAYS["convert"], batch)
    synchronize(request["device"])
    begin = time.perf_counter()
    if request["by"] == "tune":
        with subject.autocast():
            ca.tune(step.model, *subject.inputs, train=request["train"])
    else:
        step()
    synchronize(request["device"])
    seconds = time.perf_counter() - begin
    step()
    made = [choice for choice in ca.choices() if not choice.provisional]
    return {
        "seconds": numbers.significant(seconds),
        "launches": sum(choice.total_samples for choice in made),
        "choices": {f"{choice.problem.text} {choice.sampling}": choice.text for choice in made},
    }


def compared(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of a step by each store's choices and by PyTorch, in turns, and whether all
    stores give the same bits."""
    import torch
    from common.modes import synchronize
    from models.cases import WAYS
    from models.turns import calibrate, take_turns

    import cudnn_autotune as ca

    ca.set_sampling(request["sampling"])
    on_gpu = request["device"] == "cuda"
    subject, batch = subject_of(request)
    steps, results, replays = {}, [], {}
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    stream: Any = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with stream:
        for name, store in {REFERENCE: None, **request["stores"]}.items():
            way = WAYS["eager" if store is None else "convert"]
            ca.set_store(store, mode="off" if store is None else "read")
            ca.forget()
            step = steps[name] = subject.step(way, batch)
            for _ in range(3):
                step()
            if store is not None:
                results.append(step.results())
            replays[name] = step.captured(pool) if on_gpu else step
        counts = calibrate(replays, BLOCK_MS, SETTLE_S if on_gpu else 0.01, request["device"])
        times = take_turns(replays, counts, ROUNDS, request["device"])
        synchronize(request["device"])
    first, *others = results
    are_equal = all(
        torch.equal(tensor, other[name]) for other in others for name, tensor in first.items()
    )
    return {
        "times_ms": {name: numbers.median(ms) for name, ms in times.items()},
        "ratios": {
            name: numbers.median([a / b for a, b in zip(ms, times["0"], strict=True)])
            for name, ms in times.items()
        },
        "equal": are_equal,
    }


def agreement(runs: Sequence[dict[str, str]]) -> float | None:
    """The mean over the problems of the share of pairs of runs with the same choice; None if there
    is no problem, as on a CPU."""
    shares = []
    for problem in dict.fromkeys(itertools.chain(*runs)):
        pairs = list(itertools.combinations([run.get(problem) for run in runs], 2))
        shares.append(sum(a == b for a, b in pairs) / len(pairs))
    return sum(shares) / len(shares) if shares else None


def differing(runs: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The problems on which runs differ, with the choice of each run."""
    found = {
        problem: [run.get(problem, "none") for run in runs]
        for problem in dict.fromkeys(itertools.chain(*runs))
    }
    return {problem: texts for problem, texts in found.items() if len(set(texts)) > 1}


def earlier_rows(path: Path | None) -> dict[str, Any]:
    """The rows of another record by case."""
    if path is None:
        return {}
    from common.record import load

    return {row["case"]: row for row in load(path)["results"]["rows"]}


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--models", default=",".join(MODELS), help="as of models; %(default)s")
    p.add_argument("--train", action="store_true", help="forward and backward")
    p.add_argument("--batch", type=int, default=0, help="0: the largest of each model")
    p.add_argument("--by", choices=("tune", "first"), default="tune", help="see above")
    p.add_argument("--sampling", choices=("auto", "race", "sustained"), default="auto")
    p.add_argument("--runs", type=int, default=3, help="tunes of each model; %(default)s")
    p.add_argument("--against", type=Path, help="a record, whose tuning times are compared")
    p.add_argument("--process-limit", type=float, default=150, help="seconds; %(default)s")
    p.add_argument("--time-limit", type=float, default=1500, help="seconds; no model begins later")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    options = p.parse_args()
    from common.workers import records_of, serve, start

    if options.worker:
        return serve(measure)
    arguments.check_least(options, runs=2, batch=0)
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    earlier = earlier_rows(options.against)

    def row(model: str, failures: list[str]) -> Iterator[investigation.Row]:
        def asked(name: str, **more: Any) -> dict[str, Any]:
            request = {**vars(options), "json": None, "against": None, "model": model, **more}
            with contextlib.closing(start(__file__, f"{model}:{name}")) as worker:
                found = list(records_of(worker, request, options.process_limit, failures))
            if not found:
                raise RuntimeError(f"{name} has no result")
            return found[0]

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text:
            stores = {str(number): str(Path(text) / str(number)) for number in range(options.runs)}
            runs = [asked(name, store=stores[name], stores={}) for name in stores]
            steps = asked("steps", stores=stores)
        choices = [run["choices"] for run in runs]
        for problem, texts in differing(choices).items():
            print(f"{problem}: {' | '.join(texts)}", file=sys.stderr)
        share, ratios = agreement(choices), steps["ratios"]
        seconds = numbers.median([run["seconds"] for run in runs])
        before = earlier.get(model, {})
        yield {
            "problems": len(set(itertools.chain(*choices))),
            "same choice (%)": None if share is None else 100 * share,
            "the same bits": "yes" if steps["equal"] else "no",
            "step, slowest over fastest": max(ratios[n] for n in stores)
            / min(ratios[n] for n in stores),
            "step (ms)": steps["times_ms"]["0"],
            "PyTorch's over it": ratios[REFERENCE],
            "tuning (s)": seconds,
            "launches timed": numbers.median([run["launches"] for run in runs]),
            "tuning over the earlier": seconds / before["tuning (s)"] if before else None,
            "same choice, earlier (%)": before.get("same choice (%)"),
            "PyTorch's over it, earlier": before.get("PyTorch's over it"),
        }

    what = "forward and backward" if options.train else "inference"
    by = "tune()" if options.by == "tune" else "the first step"
    title = f"{options.runs} tunes of each model by {by}, {options.sampling}, {what}"
    models = [name.strip() for name in options.models.split(",")]
    return investigation.fill(__file__, options, models, row, title)


if __name__ == "__main__":
    sys.exit(main())
