#!/usr/bin/env python
"""Which engine does each sampling mode pick, how far from the best is it, what does it cost?

For each case (a layer of layers_small.json in one direction):

1. scout: one cheap, bounded look at every candidate (rough times).
2. sampling processes: each of our modes in `--runs` fresh processes, which pick, as the first
   call of the op does, and note the tuning time. A mode that would spend more than
   `--case-limit` seconds of GPU time on a case skips it, and the record says so.
3. PyTorch's modes, each in one fresh process: benchmark off, on with benchmark_limit 10, on
   with 0. PyTorch's pick cannot be named as an engine config. So that process times PyTorch's
   call and the pick of our mode `--reference` in turns; PyTorch's regret is that ratio times the
   regret of the reference pick. The ratio itself is reported too: it is the direct comparison.
4. oracle: one process times everything picked, and every candidate within
   `--survivors-within` of the best rough time, side by side in many interleaved rounds. The
   regret of a pick is its time over the best time, paired round by round.

Interleaved short batches share one clock: this is the truth of bursts. Under a power cap the
order may differ (see forum_repro.py).

The record is written after every few cases, and a second call with the same --json continues it:
a run that meets its --time-limit loses nothing. `--share 1/2` and `--share 2/2` into one file
split a run in two.

    python benchmarks/compare_sampling.py --time-limit 360 --json compare.json --plot compare.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.convolution import MODES, OUR_MODES
from comparison.report import plot, tables

LAYERS = Path(__file__).with_name("layers_small.json")


def share(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(piece) for piece in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"a share is I/N with 1 <= I <= N, as 1/2: {text!r}")
    return part, parts


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, help="write, and continue, the record here")
    p.add_argument("--plot", type=Path, help="draw the record here (.png, .svg)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    p.add_argument("--layers", type=Path, default=LAYERS, help="layer list (layers_small.json)")
    p.add_argument("--cases", help="comma-separated parts of case ids (name/op/dtype/layout)")
    p.add_argument("--share", type=share, default=(1, 1), help="I/N: every N-th case")
    p.add_argument("--modes", default=",".join(MODES), help="comma-separated, of: %(default)s")
    p.add_argument("--runs", type=int, default=3, help="fresh processes per mode of ours")
    p.add_argument("--reference", choices=OUR_MODES, default="till_stable")
    p.add_argument("--time-limit", type=float, default=360, help="seconds for all processes")
    p.add_argument("--case-limit", type=float, default=3.0, help="seconds a mode may sample a case")
    p.add_argument("--scout-rounds", type=int, default=3)
    p.add_argument("--scout-target-ms", type=float, default=0.3)
    p.add_argument("--rounds", type=int, default=24, help="oracle's rounds")
    p.add_argument("--torch-rounds", type=int, default=15, help="rounds against PyTorch's call")
    p.add_argument("--target-ms", type=float, default=0.7, help="GPU time of one batch")
    p.add_argument("--survivors-within", type=float, default=1.15, help="of the best rough time")
    p.add_argument("--survivors", type=int, default=12, help="at most so many per case")
    p.add_argument("--cache", choices=("hot", "cold"), default="hot", help="L2 before a batch")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from comparison.tasks import run

        return serve(run)
    if unknown := [mode for mode in options.modes.split(",") if mode not in MODES]:
        sys.exit(f"--modes: {unknown} unknown; allowed: {', '.join(MODES)}")

    from common.record import Record
    from common.telemetry import Telemetry
    from comparison.schedule import Session, load_layers

    arguments = {k: v for k, v in vars(options).items() if k not in ("worker", "json", "plot")}
    arguments["layers"] = options.layers.name
    arguments["share"] = list(options.share)
    record = Record(
        "compare_sampling", options.json, device=options.device, arguments=arguments, resume=True
    )
    cases = load_layers(options.layers, options)
    with Telemetry(period_s=0.1) as telemetry:

        def save() -> None:
            record.save(telemetry=telemetry.summary())

        session = Session(__file__, cases, record.results, arguments, save)
        session.run()
    left = [c for c in record.results["cases"] if not session.complete(c)]
    record.save(complete=not left, telemetry=telemetry.summary())
    for table in tables(record.data):
        table.show()
    if left:
        print(f"{len(left)} cases not complete; the same command continues", file=sys.stderr)
    if options.plot:
        plot(record.data, options.plot)
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
