#!/usr/bin/env python
"""Do the kernels of a search touch foreign memory? Runs them under compute-sanitizer.

Three processes, each with the same small problems:

- `search`, under memcheck: a layer's first forward and backward, each of which searches in the mode
  `auto`;
- `candidates`, under memcheck: the first of cuDNN's engines and every setting of our kernels,
  once, with every tensor in an allocation of its own, so that one byte beyond it is seen;
- `kernels`, under initcheck: every setting of our kernels, once, to see what reads memory that
  nothing has written.

    python benchmarks/memory_errors.py --json memory_errors.json
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from common import arguments
from common.record import Record

TOOLS = {"search": "memcheck", "candidates": "memcheck", "kernels": "initcheck"}
OPS = ("fprop", "dgrad", "wgrad")
# Engines of cuDNN of each problem; its list has some 40, and the sanitizer patches each kernel.
MOST_ENGINES = 8
_CASE, _CANDIDATE, _END = "case: ", "candidate: ", "end of all cases"
_ERROR = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY| )(?P<text>\S.*)$")


def cases() -> dict[str, dict[str, Any]]:
    """The fields of a dozen problems, one of each kind that has candidates of its own."""
    import torch

    half, last = torch.float16, torch.channels_last
    return {
        "plain": {"input_shape": (4, 64, 28, 28), "weight_shape": (64, 64, 3, 3), "padding": 1,
                  "dtype": half, "memory_format": last},
        "contiguous": {"input_shape": (3, 32, 21, 20), "weight_shape": (48, 32, 3, 3),
                       "stride": 2, "padding": 1, "dtype": half},
        "bfloat16": {"input_shape": (2, 40, 17, 19), "weight_shape": (24, 40, 5, 3),
                     "padding": (2, 1), "dtype": torch.bfloat16, "memory_format": last},
        "float32": {"input_shape": (2, 16, 20, 20), "weight_shape": (32, 16, 3, 3), "padding": 1,
                    "dtype": torch.float32, "allow_tf32": False},
        "tf32": {"input_shape": (2, 32, 18, 22), "weight_shape": (32, 32, 3, 3), "padding": 1,
                 "dtype": torch.float32, "memory_format": last},
        "pointwise": {"input_shape": (4, 64, 14, 14), "weight_shape": (128, 64, 1, 1),
                      "dtype": half, "memory_format": last},
        "pointwise, strided": {"input_shape": (4, 64, 15, 15), "weight_shape": (96, 64, 1, 1),
                               "stride": 2, "dtype": half, "memory_format": last},
        "depthwise 3x3": {"input_shape": (3, 72, 33, 13), "weight_shape": (72, 1, 3, 3),
                          "padding": 1, "groups": 72, "dtype": half, "memory_format": last},
        "depthwise 7x7": {"input_shape": (2, 96, 15, 14), "weight_shape": (96, 1, 7, 7),
                          "padding": 3, "groups": 96, "dtype": half, "memory_format": last},
        "depthwise, contiguous": {"input_shape": (2, 24, 29, 31), "weight_shape": (24, 1, 5, 5),
                                  "padding": 2, "groups": 24, "dtype": half},
        "grouped": {"input_shape": (3, 128, 14, 13), "weight_shape": (128, 8, 3, 3),
                    "padding": 1, "groups": 16, "dtype": half, "memory_format": last},
        "first layer": {"input_shape": (2, 3, 65, 63), "weight_shape": (64, 3, 7, 7), "stride": 2,
                        "padding": 3, "dtype": half, "memory_format": last},
        "one dimension": {"input_shape": (3, 32, 203), "weight_shape": (32, 32, 5), "padding": 2,
                          "dtype": half},
        "three dimensions": {"input_shape": (2, 16, 6, 10, 9), "weight_shape": (16, 16, 3, 3, 3),
                             "padding": 1, "dtype": half,
                             "memory_format": torch.channels_last_3d},
    }  # fmt: skip


def _search(fields: dict[str, Any]) -> None:
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.timers.measuring import operands

    problem = ca.ConvProblem(op="fprop", **fields)
    x, w, y = operands(problem)
    n = problem.spatial_dims
    convolve = getattr(ca.functional, f"conv{n}d")
    geometry = (problem.stride, problem.padding[:n], problem.dilation, problem.groups)
    x.requires_grad_()
    w.requires_grad_()
    with torch.backends.cudnn.flags(allow_tf32=problem.may_use_tf32):
        convolve(x, w, None, *geometry).backward(y)
    torch.cuda.synchronize()


def _run_candidates(fields: dict[str, Any], *, engines: int) -> None:
    import torch

    import cudnn_autotune as ca
    from cudnn_autotune.timers.measuring import operands

    for op in OPS:
        problem = ca.ConvProblem(op=op, **fields)
        x, w, y = operands(problem)
        given = {"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}[op]
        found = ca.expert.candidates(problem, device="cuda")
        of_cudnn = [c for c in found if c.engine is not None][:engines]
        for candidate in [*of_cudnn, *(c for c in found if c.id.is_implementation)]:
            print(f"{_CANDIDATE}{op} {candidate.text}", flush=True)
            try:
                ca.expert.execute(problem, candidate.text, *given)
            except ca.CudnnError as error:
                print(error, flush=True)
            torch.cuda.synchronize()


def work(options: argparse.Namespace) -> None:
    """Runs the cases, in the process that is under the sanitizer."""
    end = time.monotonic() + options.seconds
    for name, fields in cases().items():
        if time.monotonic() > end:
            break
        print(f"{_CASE}{name}", flush=True)
        if options.worker == "search":
            _search(fields)
        else:
            engines = MOST_ENGINES if options.worker == "candidates" else 0
            _run_candidates(fields, engines=engines)
    print(_END, flush=True)


def findings(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of what a process ran and what the sanitizer said meanwhile, from its output; a case
    that begins is a pair of its name and an empty text."""
    case, candidate = "before the first case", ""
    for line in lines:
        if line.startswith(_CASE):
            case, candidate = line.removeprefix(_CASE).strip(), ""
            yield case, ""
        elif line.startswith(_CANDIDATE):
            candidate = line.removeprefix(_CANDIDATE).strip()
        elif match := _ERROR.match(line):
            yield f"{case}: {candidate}" if candidate else case, match["text"]


def sanitized(what: str, seconds: float) -> dict[str, Any]:
    """Runs one process under the sanitizer for at most these seconds and a minute."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [tool, "--tool", TOOLS[what], "--print-limit", "50", "--report-api-errors", "no"]
    command += [sys.executable, __file__, "--worker", what, "--seconds", str(seconds)]
    settings = {"CUDNN_AUTOTUNE_CACHE": "off", "PYTHONUNBUFFERED": "1"}
    if what == "candidates":
        settings["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timer = threading.Timer(seconds + 60, process.kill)
    timer.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("=========", _CASE, "Traceback")):
            print(f"{what}: {line}", end="", flush=True)
    code = process.wait()
    timer.cancel()
    found = list(findings(lines))
    return {
        "process": what,
        "tool": TOOLS[what],
        "cases": [name for name, text in found if not text],
        "findings": [[running, text] for running, text in found if text],
        "ended": any(line.startswith(_END) for line in lines),
        "exit_status": code,
        "seconds": round(time.monotonic() - start, 1),
        "last_lines": [line.rstrip() for line in lines[-15:]] if code else [],
    }


def tables(data: dict[str, Any]) -> list[Any]:
    from common.tables import Table

    table = Table("Under compute-sanitizer", ("process", "tool", "cases", "findings", "seconds"))
    details = Table("Findings", ("process", "running", "finding"))
    for row in data["results"].get("processes", []):
        number = str(len(row["findings"]))
        count = f"{len(row['cases'])}" + ("" if row["ended"] else ", broken off")
        table.rows.append((row["process"], row["tool"], count, number, f"{row['seconds']:.0f}"))
        details.rows += [(row["process"], *finding) for finding in row["findings"][:20]]
    return [part for part in (table, details) if part.rows]


def main() -> int:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument("--processes", default=",".join(TOOLS), help="of: " + ",".join(TOOLS))
    p.add_argument("--seconds", type=float, default=120, help="of each process (%(default)s)")
    p.add_argument("--worker", choices=tuple(TOOLS), help=argparse.SUPPRESS)
    options = p.parse_args()
    arguments.check_gpu(__file__)
    if options.worker:
        work(options)
        return 0
    with Record("memory_errors", options) as record:
        rows = record.list_of("processes")
        for what in arguments.some_of("--processes", options.processes, TOOLS):
            rows.append(sanitized(what, options.seconds))
            record.save()
    return record.end(all(row["ended"] and not row["findings"] for row in rows), tables)


if __name__ == "__main__":
    sys.exit(main())
