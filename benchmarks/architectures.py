#!/usr/bin/env python
"""Which architectures of torchvision and timm run, and compute the same, under this package?

Each is built with random weights, in float32 without TF32, in evaluation and in training mode. Its
outputs by PyTorch are compared with those of the converted model, under `enable()`, and compiled by
the backend. What raises, or differs by more than `--tolerance` (of the norm), is listed with its
reason. The table has the relative errors.

    python benchmarks/architectures.py --ways convert,enable --json architectures.json
    python benchmarks/architectures.py --ways compile --cases timm:tf_efficientnet_b0,timm:nfnet_l0
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from common import arguments, investigation
from common.architectures import ARCHITECTURES, create

WAYS = ("convert", "enable", "compile")


def outputs(run: Callable[..., Any], x: Any) -> list[Any]:
    """The tensors that it returns. Dropout draws the same numbers each time."""
    import torch

    from cudnn_autotune.nn.untouched import tensors_in

    torch.manual_seed(0)
    with torch.no_grad():
        return [tensor.double() for tensor in tensors_in(run(x))]


def by_way(way: str, model: Any, x: Any) -> list[Any]:
    import torch

    import cudnn_autotune as ca

    if way == "enable":
        with ca.enable():
            return outputs(model, x)
    if way == "convert":
        model = ca.convert(model)
    else:
        torch._dynamo.reset()
        model = torch.compile(model, backend="cudnn_autotune")
    return outputs(model, x)


def error(found: list[Any], expected: list[Any]) -> float:
    """The largest of |found - expected| / |expected| of the tensors, by the Frobenius norm."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        raise ValueError(f"{len(found)} tensors of other shapes")
    return max(
        float((one - other).norm() / other.norm().clamp_min(1e-30))
        for one, other in zip(found, expected, strict=True)
    )


def compare(
    name: str, ways: list[str], options: Any, failures: list[str]
) -> list[investigation.Row]:
    """A row for each state of the model; appends to ``failures`` what fails."""
    import cudnn_autotune as ca

    original, x = create(name, options.batch, options.size, options.device)
    report = ca.conversion(ca.convert(copy.deepcopy(original)))
    rows = []
    for state in ("eval", "train"):
        original.train(state == "train")
        row: investigation.Row = {"state": state, "served": len(report.served)}
        expected = outputs(copy.deepcopy(original), x)
        for way in ways:
            row[way] = None
            try:
                row[way] = error(by_way(way, copy.deepcopy(original), x), expected)
                if not row[way] <= options.tolerance:
                    raise ValueError(f"outputs differ by {row[way]:.2g}")
            except Exception as problem:  # the other ways and architectures still count
                text = f"{type(problem).__name__}: {problem}".splitlines()[0]
                failures.append(f"{name} ({state}, {way}): {text}")
        rows.append(row)
    failures += [f"{name}: {module} is left: {why}" for module, why in report.left.items()]
    return rows


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--cases", default=",".join(ARCHITECTURES), help="default: all of them")
    p.add_argument("--ways", default=",".join(WAYS), help="%(default)s")
    p.add_argument("--sampling", default="heuristic", help="the mode of all ways (%(default)s)")
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--size", type=int, default=0, help="of an image's sides; 0: the model's own")
    p.add_argument("--tolerance", type=float, default=1e-3, help="%(default)s")
    p.add_argument("--time-limit", type=float, default=540, help="seconds; none begins later")
    options = p.parse_args()
    ways = arguments.some_of("--ways", options.ways, WAYS)
    names = arguments.some_of("--cases", options.cases, ARCHITECTURES)
    arguments.check_least(options, batch=2, size=0)
    if options.device == "cuda":
        arguments.check_gpu(__file__)
    import torch

    import cudnn_autotune as ca

    torch._inductor.config.fallback_random = True
    title = "Relative errors of outputs, next to PyTorch's"
    flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision=None)
    with flags, ca.flags(options.sampling):
        return investigation.fill(
            __file__,
            options,
            names,
            lambda name, failures: compare(name, ways, options, failures),
            title,
        )


if __name__ == "__main__":
    sys.exit(main())
