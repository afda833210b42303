"""A progress bar of the tuning of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cudnn_autotune.tuning.model_tuning import Progress


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows a bar within the context; yields the function that moves it."""
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as bar:
        task = bar.add_task("tuning", total=None, left="")

        def report(progress: Progress) -> None:
            loss = progress.expected_loss
            left = "timing" if loss is None else f"the step may gain {100 * loss:.2f} %"
            bar.update(task, total=progress.problems, completed=progress.decided, left=left)

        yield report
