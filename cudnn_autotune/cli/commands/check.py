"""``cudnn-autotune check``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import torch

from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.wording import say, size
from cudnn_autotune.core.display import count, milliseconds
from cudnn_autotune.core.extension import require_cuda_build
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.candidates import candidates, named
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.configs import Candidate, build_plan, cuda_index
from cudnn_autotune.engines.offers import described, gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import EngineLaunch, Kernel, KernelLaunch, Recipe
from cudnn_autotune.expert import measure
from cudnn_autotune.kernels.sources import files_of
from cudnn_autotune.timers.measuring import telling_operands
from cudnn_autotune.tools import options
from cudnn_autotune.tools.options import refuse
from cudnn_autotune.tuning.checking import examined, tolerance

_NOT_HERE = "h100"
"""The GPU that candidates are built for where there is none."""

Report = Callable[[ConvProblem, str], tuple[bool, str]]
"""(problem, candidate's text) -> whether nothing is wrong with it, and what was found. It raises
RuntimeError where the candidate does not build or run."""


@click.command()
@options.shape_options
@click.option(
    "--candidate",
    "given",
    type=options.WORD,
    metavar="TEXT",
    help="A candidate's text, or the name that its text begins with. [default: all]",
)
@click.option(
    "--gpu",
    metavar="NAME|FILE",
    help="A GPU that is not here: h200, h100, a100, l4, t4, or a property file.",
)
def check(gpu: str | None, given: str | None, **layer: Any) -> None:
    """Build candidates for one layer, run them, and compare them with a reference.

    Exit status 1 where one does not build, fails or is wrong. Without a GPU, or for that of --gpu,
    candidates are only built, and nothing is run.
    """
    if layer["weight"] is None or len(layer["input"]) != 1:
        raise refuse("--weight", "is needed, with one --input: a layer is checked")
    problems = tune_problems.of_layer(layer)
    require_cuda_build()
    is_run = gpu is None and torch.cuda.is_available()
    device = gpu or ("cuda" if is_run else _NOT_HERE)
    with options.refusing("--gpu"):
        if not is_run and cuda_index(device) is not None:
            raise ValueError(f"must be a GPU that is not here, got {device!r}")
        gpu_of(device)
    report = _run if is_run else _builder(device)
    at_fault = 0
    for problem in problems:
        say(f"{problem.text} on {torch.cuda.get_device_name() if is_run else device}")
        for text in _texts(problem, device, given):
            try:
                is_fine, found = report(problem, text)
            except RuntimeError as failure:
                # Engines that cuDNN lists and cannot build are not rare, and nobody's fault.
                is_fine = given is None and not identify(text).is_implementation
                found = f"fails: {failure}"
            at_fault += not is_fine
            say(f"  {text}: {found}")
    if not is_run:
        why = f"{device} is not here" if gpu else "there is no CUDA GPU here"
        say(f"Nothing was run, since {why}: whether outputs are right, and times, are not known.")
    if at_fault:
        raise click.ClickException(f"{count(at_fault, 'candidate')} at fault")


def _texts(problem: ConvProblem, device: str, given: str | None) -> Sequence[str]:
    """The texts of the candidates that ``given`` names, which the heuristics need not list."""
    listed = candidates(problem, device)
    found = [one.text for one in listed if given is None or given in _names(one)]
    if found or given is None:
        return found
    try:
        return [named(given).text]
    except ValueError:
        offered = ", ".join(dict.fromkeys(_names(one)[-1] for one in listed))
        raise refuse(
            "--candidate", f"{given!r} is not offered for {problem.text}; allowed are: {offered}"
        ) from None


def _names(candidate: Candidate) -> tuple[str, str, str]:
    """The text of a candidate, and the names that it begins with."""
    return candidate.text, candidate.engine_name, candidate.id.name


def _run(problem: ConvProblem, text: str) -> tuple[bool, str]:
    """Builds, runs, compares and times a candidate on the current GPU."""
    plan = build_plan(problem, text)
    checked = examined(problem, text, plan, telling_operands(problem))
    error = checked.error()
    if error is None:
        return False, "could not be compared with the reference"
    if error > tolerance(problem):
        return False, checked.fault()
    time_ms = statistics.median(measure(problem, [text])[text])
    return True, (
        f"right, relative error {error:.2g} of at most {tolerance(problem):g}; "
        f"{milliseconds(time_ms)} ms; workspace {size(plan.workspace_bytes)}"
    )


def _builder(device: str) -> Report:
    """Returns the function that builds what can be built for a GPU that is not here."""

    def build(problem: ConvProblem, text: str) -> tuple[bool, str]:
        if identify(text).is_implementation:
            gpu = gpu_of(device)
            described(text, problem, gpu)
            recipe = recipe_of(text, problem, gpu)
            parts = "; ".join(_parts(recipe, device))
            return True, f"{parts}; workspace {size(recipe.workspace_bytes)}"
        if not require_cuda_build().is_engine(text):
            return True, "is PyTorch's, and is not built"
        plan = build_plan(problem, text, device)
        return True, f"builds; workspace {size(plan.workspace_bytes)}"

    return build


def _parts(recipe: Recipe, device: str) -> Iterator[str]:
    """Builds the launches of a recipe, and says of each what became of it."""
    for launch in recipe.launches:
        if isinstance(launch, KernelLaunch):
            kernel = launch.kernel
            if isinstance(kernel, Kernel):
                code = cubin(kernel, gpu_of(device).compute_capability)
                files = ", ".join(files_of(kernel.source))
                of_files = f" ({files})" if files else ""
                yield f"{kernel.function}{of_files} compiles to {size(len(code))}"
            else:
                yield f"{kernel.function} was compiled before"
        elif isinstance(launch, EngineLaunch):
            build_plan(launch.problem, launch.engine_text, device)
            yield f"{launch.engine_text} builds"
        else:
            yield "a Python function is not built"
