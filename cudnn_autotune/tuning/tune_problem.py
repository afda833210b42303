"""The tuning of a problem by itself, without a layer that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from cudnn_autotune.engines.problem import MOST_ALIGNED, ConvProblem, Operands
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import (
    WRITTEN,
    operands,
    run_operator,
)
from cudnn_autotune.tuning import choice_log, new_sizes, settings
from cudnn_autotune.tuning.pins import pinned
from cudnn_autotune.tuning.remembering import retuned


def tune(
    problem: ConvProblem,
    device: int,
    sampling: str,
    *,
    retune: bool = False,
    data: Operands | None = None,
) -> Decision:
    """Returns the decision for a problem on a CUDA device: a known final one, else a search's.

    Args:
        device: index of the CUDA device.
        sampling: the mode; other settings are the process's.
        retune: search even if a decision is known.
        data: the operands; None stands for random ones.

    Raises:
        RuntimeError: PyTorch serves the problem without cuDNN or this package, it cannot be tuned
            on the device, or an engine is pinned for it.
        ValueError: an alignment is impossible: less than one element, or less than 32 bytes for the
            result, which torch allocates.
    """
    check_tunable(problem)
    data = operands(problem, torch.device("cuda", device)) if data is None else data
    choice_log.forget_unsettled(problem)
    with (
        torch.cuda.device(device),
        flags_of(problem, "cuda"),
        new_sizes.always_searched(problem),
        retuned(problem) if retune else nullcontext(),
    ):
        run_operator(problem, data, sampling)
        torch.cuda.synchronize(device)
    choice = choice_log.find(problem, settings.policy_of(sampling), device)
    if choice is not None:
        return choice.decision
    reasons = ", ".join(choice_log.fallbacks()) or "it is served by PyTorch"
    raise RuntimeError(f"{problem.text}: no choice was made: {reasons}")


def check_tunable(problem: ConvProblem) -> None:
    """Raises as :func:`tune` for a problem that cannot be tuned on any device."""
    if (text := pinned(problem)) is not None:
        raise RuntimeError(f"{problem.text}: {text} is pinned, which leaves nothing to tune")
    if problem.alignment[WRITTEN[problem.op]] != MOST_ALIGNED:
        raise ValueError(
            f"problem.alignment must be {MOST_ALIGNED} bytes for what {problem.op} writes, "
            f"got {problem.alignment} (input, weight, output)"
        )


_REDUCED_PRECISION = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


@contextmanager
def flags_of(problem: ConvProblem, device_type: str) -> Iterator[None]:
    """Sets PyTorch's global flags as the problem needs them, and restores the caller's afterwards.
    A flag that already has the right value is not set."""
    with ExitStack() as stack:

        def set_for_now(setter: Callable[[Any], object], wanted: object, before: object) -> None:
            if before != wanted:
                stack.callback(setter, before)
                setter(wanted)

        # Through torch._C, because torch.backends.cudnn may refuse assignments, and its context
        # manager fails where the caller has set the precision of convolutions by its newer name.
        c = torch._C
        set_for_now(c._set_cudnn_enabled, True, c._get_cudnn_enabled())
        set_for_now(c._set_cudnn_deterministic, problem.deterministic, c._get_cudnn_deterministic())
        if not problem.deterministic and torch.are_deterministic_algorithms_enabled():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
            torch.use_deterministic_algorithms(False)
        if hasattr(c, "_get_cudnn_depthwise_kernel"):  # torch 2.14 and later
            set_for_now(
                c._set_cudnn_depthwise_kernel,
                problem.depthwise_kernel,
                c._get_cudnn_depthwise_kernel(),
            )
        precision = c._get_fp32_precision_getter("cuda", "conv")
        if problem.dtype == torch.float32 and (precision == "tf32") != problem.allow_tf32:
            wanted = "tf32" if problem.allow_tf32 else "ieee"
            setter = partial(c._set_fp32_precision_setter, "cuda", "conv")
            set_for_now(setter, wanted, precision)
        if (name := _REDUCED_PRECISION.get(problem.dtype)) is not None:
            matmul = torch.backends.cuda.matmul
            allowed = (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
            if all(allowed) != problem.allow_reduced_precision:
                wanted_too = (problem.allow_reduced_precision, True)
                set_for_now(partial(setattr, matmul, name), wanted_too, allowed)
        # Autocast would turn the operands of a forward convolution into another problem's.
        with torch.autocast(device_type, enabled=False):
            yield
