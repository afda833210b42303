"""Figures without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(rows: int = 1, columns: int = 1, *, width: float = 10, height: float = 4, **more: Any):  # type: ignore[no-untyped-def]
    """(figure, axes) on the Agg canvas; matplotlib is imported only where a plot is asked for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(width, height), constrained_layout=True, squeeze=False, **more
    )


def save(fig: Any, path: Path, environment: dict[str, Any]) -> None:
    """Writes the figure with its origin in small print."""
    from matplotlib import pyplot

    where = environment.get("gpu") or "CPU dry run, not a result"
    text = (
        f"{where} · torch {environment.get('torch')} · cuDNN {environment.get('cudnn')}"
        f" · {str(environment.get('date'))[:10]} · {str(environment.get('commit'))[:10]}"
    )
    fig.supxlabel(text, fontsize=7, color="gray", x=0.99, ha="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    pyplot.close(fig)
