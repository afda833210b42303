"""First calls of models in a process that has a store, and what is measured in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.compile import entry
from cudnn_autotune.timers.stopwatch import Stopwatch
from support.processes.subprocesses import evaluate_forked

KINDS = ("inference", "freezing", "layouts", "training", "convert", "convert in training")
SERVED = {"fuse": "always", "cpp.weight_prepack": False}


def in_process(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Returns what :func:`first_call` does in a process of its own."""
    code = (
        "import json; from support.store.first_calls import first_call\n"
        f"print(json.dumps(first_call({str(folder)!r}, {kind!r}, **{changes!r})))"
    )
    found: dict[str, Any] = json.loads(evaluate_forked(code).splitlines()[-1])
    return found


def first_call(
    folder: str,
    kind: str,
    *,
    mode: str = "read_write",
    batch: int = 4,
    activation: str = "ReLU",
    torch_version: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Calls a new model for the first time.

    Args:
        kind: one of ``KINDS``.
        mode: the store's.
        activation: the class of what follows a convolution.
        torch_version: what the process takes torch's version for; None: what it is.
        options: those of the backend.

    Returns:
        ``measured``: uses of a stopwatch; ``source`` and ``times``: those of the record;
        ``right``: whether the outputs are the model's; ``fallbacks``: the process's.
    """
    ca.set_store(folder, mode=mode)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = _model(getattr(nn, activation)()).eval()
    x = torch.randn(batch, 8, 6, 5)
    expected = model(x).detach()
    is_trained = kind in ("training", "convert in training")
    model.train(is_trained)
    given = {
        "freezing": {"freezing": True},
        "layouts": {"memory_format": "auto"},
        "training": {"norms": "measure"},
    }.get(kind, {})
    before = Stopwatch.uses
    with (
        mock.patch.object(torch, "__version__", torch_version or torch.__version__),
        mock.patch.object(entry, "_why_plain", return_value=None),
        torch.set_grad_enabled(is_trained),
    ):
        if kind.startswith("convert"):
            ca.convert(model, memory_format="auto", example_input=x)
            choice = ca.conversion(model).memory_format
            source = "store" if "from the store" in choice.reason else "tuned"
            times = {str(name): ms for name, ms in choice.times_ms.items()}
        else:
            run = torch.compile(
                model, backend="cudnn_autotune", options={**SERVED, **given, **options}
            )
            run(x)
            record = ca.compilations()[-1]
            source, times = record.source, record.times_ms
        measured = Stopwatch.uses - before
        output = (model if kind.startswith("convert") else run)(x)
    model.eval()
    is_right = is_trained or torch.allclose(output, expected, atol=1e-5)
    return {
        "measured": measured,
        "source": source,
        "times": times,
        "right": is_right,
        "fallbacks": ca.fallbacks(),
    }


def _model(activation: nn.Module) -> nn.Module:
    layers = [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation]
    return nn.Sequential(*layers, nn.Conv2d(16, 8, 1))
