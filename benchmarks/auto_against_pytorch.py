#!/usr/bin/env python
"""Is `auto` ever slower than PyTorch's benchmark mode, on layers that the audits have few of?

Random layers in one and three dimensions, transposed and grouped ones, forward or one gradient of
the backward, in float16, bfloat16 and float32, in both layouts. Each is a call of PyTorch's own
operator: PyTorch runs it with benchmark on and limit 10, and `auto` while `enable("auto")` is in
force, in turns in one process. What is below 0.99 is measured once more with more rounds before it
counts, and then on sets of tensors in turn, that the L2 cache does not hold: `auto` chooses for
such, while a call repeated on one set finds all of it there. The first layer is one that was slower
once.

    python benchmarks/auto_against_pytorch.py --json auto_against_pytorch.json
    python benchmarks/auto_against_pytorch.py --seconds 60 --kinds 3-d,transposed --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from against_pytorch.layers import KINDS, OPS, Layer, draw
from common import arguments
from common.numbers import geometric_mean
from common.record import Record
from common.tables import Table, columns, dry_run_note, number

WORSE = 0.99
_SHOWN = 15


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--layers", type=int, default=200, help="how many; %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of the layers and their data")
    p.add_argument("--kinds", default=",".join(KINDS), help="of: %(default)s")
    p.add_argument("--only", nargs="*", help="only drawn layers whose text has one of these")
    p.add_argument("--seconds", type=float, default=200, help="begins no layer after so many")
    return p


def measured(options: argparse.Namespace, layers: list[Layer], record: Record) -> None:
    """Measures one layer after the other into the record."""
    import gc

    import torch
    from against_pytorch.measure import measure
    from common.modes import set_torch_mode

    import cudnn_autotune as ca

    ca.set_store(mode="off")
    ca.set_new_shapes("tune")  # each layer is searched, though the shapes keep changing
    set_torch_mode("pytorch_on_10")
    torch.manual_seed(options.seed)
    if options.device == "cpu":
        torch.set_num_threads(1)  # tiny layers gain nothing by more
    rows, failures = record.list_of("rows"), record.list_of("failures")
    begin = time.monotonic()
    for index, layer in enumerate(layers):
        if time.monotonic() - begin > options.seconds:
            record.results["not measured"] = len(layers) - index
            break
        try:
            row = measure(layer, options.device, WORSE)
        except Exception as error:  # the other layers still count
            failures.append(f"{layer.text}: {type(error).__name__}: {error}".splitlines()[0])
            print(failures[-1], flush=True)
            if "CUDA error" in str(error):
                break
            continue
        finally:
            ca.disable()
        rows.append({"case": layer.text, **row})
        print(f"{row['PyTorch over auto']:.3f} {layer.text} {row['engine']}", flush=True)
        record.save()
        gc.collect()


def tables(data: dict[str, Any]) -> list[Table]:
    """A summary by kind and operation, and the layers that are worst."""
    results = data["results"]
    header = columns("kind|operation|layers|geometric mean|least|most|below 0.99")
    note = "PyTorch's time over that of auto." + dry_run_note(data)
    if results.get("not measured"):
        note += f" {results['not measured']} layers were not measured for want of time."
    note += "".join(f" {failure}." for failure in results.get("failures", []))
    summary = Table("auto against PyTorch's benchmark mode with limit 10", header, note=note)
    rows = results.get("rows", [])
    groups = [(kind, op) for kind in KINDS for op in OPS]
    for kind, op in [*groups, ("all", "all")]:
        found = [
            row["PyTorch over auto"]
            for row in rows
            if (kind == "all" or row["kind"] == kind) and (op == "all" or row["op"] == op)
        ]
        if found:
            shown = map(number, (geometric_mean(found), min(found), max(found)))
            worse = sum(ratio < WORSE for ratio in found)
            summary.rows.append([kind, op, str(len(found)), *shown, str(worse)])
    worst = Table(
        "The layers with the least of these",
        columns(
            "layer|PyTorch (us)|auto (us)|PyTorch over auto|95 % interval|cold operands|engine"
        ),
    )
    for row in sorted(rows, key=lambda row: row["PyTorch over auto"])[:_SHOWN]:
        worst.rows.append(
            [
                row["case"],
                number(row["PyTorch (us)"], 1),
                number(row["auto (us)"], 1),
                number(row["PyTorch over auto"]),
                f"{row['least']:.3f} to {row['most']:.3f}",
                number(cold) if (cold := row.get("PyTorch over auto, cold operands")) else "",
                str(row["engine"] or "-"),
            ]
        )
    return [summary, worst]


def main() -> int:
    options = parser().parse_args()
    arguments.check_least(options, layers=1)
    kinds = arguments.some_of("--kinds", options.kinds, KINDS)
    is_dry = options.device == "cpu"
    layers = draw(options.layers, options.seed, kinds, is_dry)
    if options.only:
        layers = [layer for layer in layers if any(text in layer.text for text in options.only)]
    if not is_dry:
        arguments.check_gpu(__file__)
    record = Record("auto_against_pytorch", options)
    record.list_of("rows")
    with record:
        measured(options, layers, record)
    return record.end(not record.list_of("failures"), tables)


if __name__ == "__main__":
    sys.exit(main())
