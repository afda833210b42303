"""What is known of a problem before it is tuned, and what is kept of it afterwards.

Asked in this order: a pin, what ranks have agreed upon, the store (``store_settings``). What was
tuned goes into the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.store import Decision, Provenance, later
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import key_of
from cudnn_autotune.store.neighbours import nearest
from cudnn_autotune.timers.measuring import MOST_ALIGNED, WRITTEN, operands, run_operator
from cudnn_autotune.tuning import choice_log, probing, settings
from cudnn_autotune.tuning.choice_log import Choice
from cudnn_autotune.tuning.pins import pinned


@dataclass(frozen=True)
class Known:
    """What serves a problem without timing anything."""

    text: str
    origin: str
    decision: Decision | None = None
    """None for a pin."""


_log = logging.getLogger(__name__)
_lock = threading.Lock()
_agreed: dict[tuple[int, str], Decision] = {}
_tuned_anew: set[ConvProblem] = set()


def find(
    problem: ConvProblem,
    sampling: str,
    workspace_limit: int | None,
    benchmark_limit: int,
    device: int,
) -> Known | None:
    """What serves ``problem`` under a policy, without timing; None where it must be tuned. A probe
    knows of pins only."""
    text = pinned(problem)
    if text is not None:
        return Known(text, "pinned")
    if probing.is_probe(benchmark_limit):
        return None
    with _lock:
        if problem in _tuned_anew:
            return None
        agreed = _agreed.get((device, key_of(problem, sampling, benchmark_limit)))
    decision = (
        None if agreed is None else agreed.restricted_to(problem.deterministic, workspace_limit)
    )
    if decision is not None:
        return _known(decision, "agreed")
    if store_settings.is_read():
        layers = store_settings.layers(device)
        decision = layers.find(
            problem,
            sampling=sampling,
            workspace_limit=workspace_limit,
            benchmark_limit=benchmark_limit,
        )
        if decision is not None:
            return _known(decision, "store")
    return None


def _known(decision: Decision, origin: str) -> Known:
    return Known(decision.selection.winner.candidate.text, origin, decision)


def reject(known: Known, device: int) -> None:
    """Notes that what is known cannot serve on ``device``: it would else be preferred to what will
    be tuned instead, for ever. What is pinned stays."""
    if known.decision is None:
        return
    if known.origin == "agreed":
        with _lock:
            _agreed.pop((device, known.decision.key), None)
    if store_settings.is_read() or store_settings.is_written():
        later.change(partial(store_settings.layers(device).reject, known.decision))


def similar(problem: ConvProblem, device: int) -> list[Candidate]:
    """What was chosen for the problems that are most like ``problem``, the nearest first."""
    if not store_settings.is_read():
        return []
    layers = store_settings.layers(device)
    found: dict[str, Candidate] = {}
    for key in nearest(problem, layers.keys()):
        decision = layers.by_key(key)
        if decision is not None and decision.chosen is not None:
            found.setdefault(decision.chosen.candidate.text, decision.chosen.candidate)
    return list(found.values())


def keep(choice: Choice) -> None:
    """Stores what was tuned here, now or ``later``; what nobody timed is not worth it."""
    is_measured = choice.total_samples > 0
    if store_settings.is_written() and choice.origin == "tuned" and choice.chosen and is_measured:
        later.change(partial(_store, choice))


def _store(choice: Choice) -> None:
    try:
        store_settings.layers(choice.device).add([decision_of(choice)], are_latest=True)
    except ValueError as error:  # what a strategy of the user's has brought
        _log.warning("%s: %s is not kept: %s", choice.problem.text, choice.text, error)


def decision_of(choice: Choice) -> Decision:
    """A choice as it is kept: the frontier with the chosen one first."""
    chosen = choice.chosen or Measurement(ATEN, None, 0)
    selection = choice.selection or Selection((chosen,), 0)
    others = [entry for entry in selection.ranking if entry.candidate.text != choice.text]
    return Decision(
        problem=choice.problem,
        sampling=choice.sampling,
        benchmark_limit=choice.benchmark_limit,
        workspace_limit=choice.workspace_limit,
        selection=replace(selection, ranking=(chosen, *others)),
        relative_error=choice.relative_error,
        rejected=choice.rejected,
        provenance=choice.provenance or provenance_now(choice.device),
    )


def provenance_now(device: int) -> Provenance:
    """Of what is measured on ``device`` by this process, at this moment."""
    driver = environment(device)["driver"] if torch.cuda.is_available() else None
    return Provenance.now(driver or "")


def choice_of(known: Decision, device: int, origin: str) -> Choice:
    """A decision as it is told of, before its first call."""
    chosen = known.selection.winner
    return Choice(
        problem=known.problem,
        device=device,
        sampling=known.sampling,
        workspace_limit=known.workspace_limit,
        benchmark_limit=known.benchmark_limit,
        text=chosen.candidate.text,
        chosen=chosen,
        tuning_ms=0.0,
        selection=known.selection,
        relative_error=known.relative_error,
        rejected=known.rejected,
        origin=origin,
        provenance=known.provenance,
    )


def install(decisions: Iterable[Decision], device: int) -> None:
    """What ranks have agreed upon: from now on it serves its problems on ``device``, and it is
    what the store gets."""
    decisions = list(decisions)
    with _lock:
        for decision in decisions:
            _agreed[device, decision.key] = decision
    for decision in decisions:
        choice_log.forget_problem(decision.problem)
        choice_log.record(choice_of(decision, device, "agreed"))
    measured = [d for d in decisions if d.selection.total_samples > 0]
    if store_settings.is_written() and measured:
        store_settings.layers(device).add(measured, are_latest=True)


def forget() -> None:
    """Clears all choices, built plans and counts, and what ranks have agreed upon: the next call of
    each shape looks anew. What was pinned, and what is on disk, stays."""
    with _lock:
        _agreed.clear()
    choice_log.forget()


def tune(problem: ConvProblem, device: int, sampling: str, *, anew: bool = False) -> Decision:
    """The decision for a problem, by tuning it now unless it is known already.

    Args:
        anew: what has been chosen for it, in this process or before, does not count as known.

    Raises:
        RuntimeError: cuDNN and this package have no part in the problem (PyTorch serves it), it
            cannot be tuned on the device, or an engine is pinned for it.
        ValueError: an alignment that no call has: of less than one element, or of less than 32
            bytes for the result, which is allocated anew.
    """
    if (text := pinned(problem)) is not None:
        raise RuntimeError(f"{problem.text}: {text} is pinned, which leaves nothing to tune")
    if problem.alignment[WRITTEN[problem.op]] != MOST_ALIGNED:
        raise ValueError(
            f"problem.alignment must be {MOST_ALIGNED} bytes for what {problem.op} writes, "
            f"got {problem.alignment} (input, weight, output)"
        )
    data = operands(problem, torch.device("cuda", device))
    with torch.cuda.device(device), _as_asked(problem, "cuda"), _forgotten(problem, anew):
        run_operator(problem, data, sampling)
        torch.cuda.synchronize(device)
    policy = (sampling, settings.get_workspace_limit(), settings.get_benchmark_limit())
    for made in choice_log.choices():
        known = (made.sampling, made.workspace_limit, made.benchmark_limit)
        if (made.problem, made.device) == (problem, device) and known == policy:
            return decision_of(made)
    reasons = ", ".join(choice_log.fallbacks()) or "it is served by PyTorch"
    raise RuntimeError(f"{problem.text}: no choice was made: {reasons}")


@contextmanager
def _forgotten(problem: ConvProblem, is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    choice_log.forget_problem(problem)
    with _lock:
        _tuned_anew.add(problem)
    try:
        yield
    finally:
        with _lock:
            _tuned_anew.discard(problem)


_REDUCED_PRECISION = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


@contextmanager
def _as_asked(problem: ConvProblem, device_type: str) -> Iterator[None]:
    """What a problem says is what is computed, whatever the caller's settings are. They end as they
    were; one that says the same already is not touched."""
    with ExitStack() as stack:

        def set_for_now(setter: Callable[[Any], object], wanted: object, before: object) -> None:
            if before != wanted:
                stack.callback(setter, before)
                setter(wanted)

        # By torch._C: torch.backends.cudnn may refuse assignments, and its context manager fails
        # where the caller has set the precision of convolutions by its newer name.
        c = torch._C
        set_for_now(c._set_cudnn_enabled, True, c._get_cudnn_enabled())
        set_for_now(c._set_cudnn_deterministic, problem.deterministic, c._get_cudnn_deterministic())
        if not problem.deterministic and torch.are_deterministic_algorithms_enabled():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
            torch.use_deterministic_algorithms(False)
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
