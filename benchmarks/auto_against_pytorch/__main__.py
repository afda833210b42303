#!/usr/bin/env python
"""Is `auto` ever slower than PyTorch's benchmark mode, on layers that are rare in the audits?

The layers are random: in one and three dimensions, transposed and grouped, forward or one gradient.
They are in float16, bfloat16 and float32, and in both layouts. Each is a call of PyTorch's own
operator. PyTorch runs it with benchmark on and limit 10, and `auto` under `enable("auto")`, in
turns in one process. A ratio below 0.99 is measured once more with more rounds before it counts.
Then sets of tensors take turns that the L2 cache does not hold: `auto` chooses for such calls, but
a repeated call on one set finds it in the cache. The first layer was slower once.

    python benchmarks/auto_against_pytorch --json auto_against_pytorch.json
    python benchmarks/auto_against_pytorch --seconds 60 --kinds 3-d,transposed --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments
from common.record import Record

from auto_against_pytorch.layers import KINDS, Layer, draw
from auto_against_pytorch.report import WORSE, tables


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--layers", type=int, default=200, help="how many; %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of the layers and their data")
    p.add_argument("--kinds", default=",".join(KINDS), help="of: %(default)s")
    p.add_argument("--only", nargs="*", help="only drawn layers whose text has one of these")
    p.add_argument("--seconds", type=float, default=200, help="after which no layer begins")
    return p


def measured(options: argparse.Namespace, layers: list[Layer], record: Record) -> None:
    """Measures one layer after the other into the record."""
    import gc

    import torch
    from common.modes import set_torch_mode

    import cudnn_autotune as ca
    from auto_against_pytorch.measure import measure

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
