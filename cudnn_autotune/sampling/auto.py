"""``auto``, the default: a short race of the few candidates that usually win.

A first call waits for it, so its cost is about that of PyTorch's benchmark mode. :class:`Shortlist`
has its candidates, and ``race.race_selection`` chooses the winner. The modes ``race`` and
``sustained`` also look at the rest of the list, further kernels, engines that are seldom the
fastest, and the board's throttling, which seldom change the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.unlisted import (
    first_of_each,
    has_faster_kernels,
    is_seldom_fastest,
    timed_by_pytorch,
)
from cudnn_autotune.sampling.race import Race
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.strategy import Candidates

# The most precompiled candidates of mode A that are timed, of each kind (fused, unfused). It is
# PyTorch's default for torch.backends.cudnn.benchmark_limit.
_MOST_LISTED = 10
# The first offer of an implementation is often not the fastest. A kernel of the package won on 144
# recorded layers and directions: the first offer on 45, one of the first four on 142
# (docs/results/h200.md#kernels).
_MOST_OFFERS = 4
# Engines for most activations are all compiled at run time, and PyTorch has no plan with one. The
# fastest is nearly always among the first of mode A.
_MOST_COMPILED = 4
# Mode B hardly ever lists a faster one than these two modes, and its query takes twice as long.
_MODES = ("A", "FALLBACK")


class Shortlist:
    """The candidates of a problem that usually win (a ``sampling.strategy.Candidates``).

    Its sources, with the number of their candidates and exceptions:

    - winners on similar problems: all, with one compiled kernel of each engine;
    - candidates that PyTorch's benchmark mode times: up to 10; unless there is an activation;
    - mode A, compiled at run time: 4; only with an activation, unless a kernel of ours is faster;
    - mode A, precompiled: 10 of each kind (``Candidate.is_unfused``);
    - mode FALLBACK, precompiled: all, for a problem that no other candidate computes;
    - PyTorch's own path: always;
    - implementations: 4 offers of each;
    - engines compiled at run time: 1 kernel of each, the winner on a similar problem, else the
      first of its portfolio, else the listed one; unless there is an activation, the engine is
      seldom the fastest, or a kernel of ours is faster.

    Winners on similar problems stay in any case, and so does the plan that PyTorch runs by default.
    An engine that is seldom the fastest also stays if PyTorch would time it.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._of_mode = {mode: candidates.of_mode(mode) for mode in _MODES}
        listed = self.all()
        self._beyond = candidates.beyond()
        self._similar = candidates.similar()
        self.problem = candidates.problem
        self.aten_uses_cudnn = candidates.aten_uses_cudnn
        everything = [*self._similar, *self._beyond, *listed]
        kernels = first_of_each((c for c in everything if c.engine is None), _MOST_OFFERS)
        kernels += first_of_each(c for c in everything if c.engine is not None and c.is_compiled)
        of_a = [c for c in self._of_mode["A"] if not c.is_compiled]
        has_faster = has_faster_kernels(self.problem, kernels)
        if self.problem is not None and self.problem.activation:
            compiled = [] if has_faster else [c for c in self._of_mode["A"] if c.is_compiled]
            in_any_case = compiled[:_MOST_COMPILED]
            if in_any_case:
                kernels = [c for c in kernels if c.engine is None or c in self._similar]
        else:
            # The plan that PyTorch would run is timed at any cost; none of its plans adds a bias.
            in_any_case = [
                *([c for c in listed if c.is_unfused] or listed)[:1],
                *(
                    c
                    for c in timed_by_pytorch(self.problem, listed)
                    if not (has_faster and c.is_compiled)
                ),
            ]
        if of_a or has_faster:
            needed = {c.text for c in [*self._similar, *in_any_case]}
            kernels = [
                c
                for c in kernels
                if c.text in needed
                or not (is_seldom_fastest(c, self.problem) or (has_faster and c.engine is not None))
            ]
        first = [c for c in of_a if c.is_unfused][:_MOST_LISTED]
        first += [c for c in of_a if not c.is_unfused][:_MOST_LISTED]
        last = [c for c in self._of_mode["FALLBACK"] if not c.is_compiled]
        kept = {c.text for c in [*in_any_case, *first, *last, *kernels]}
        others = {c.text: c for c in [*listed, *self._beyond] if c.is_compiled}
        self._other_kernels = [c for c in others.values() if c.text not in kept]
        self._of_mode = {
            mode: [c for c in some if c.text in kept] for mode, some in self._of_mode.items()
        }
        self._beyond = [c for c in self._beyond if c.text in kept]
        self._similar = [c for c in self._similar if not c.is_compiled or c.text in kept]

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        return self._of_mode.get(heuristic_mode, [])

    def all(self) -> Sequence[Candidate]:
        return [c for mode in _MODES for c in self._of_mode[mode]]

    def beyond(self) -> Sequence[Candidate]:
        return self._beyond

    def similar(self) -> Sequence[Candidate]:
        return self._similar

    def other_kernels(self, engines: Collection[str]) -> list[Candidate]:
        """Returns the kernels, not in the list, of some engines (``Candidate.engine_name``) that
        are compiled at run time."""
        return [c for c in self._other_kernels if c.engine_name in engines]


def few(candidates: Candidates, limit: int = 0) -> list[Candidate]:
    """Returns the candidates of a new size's trial: winners on similar problems, the first
    precompiled one of mode A, and the first precompiled one of each other kind."""
    first = [c for c in candidates.of_mode("A") if not c.is_compiled][:1]
    beyond = [c for c in candidates.beyond() if c != OWN_PATH or not candidates.aten_uses_cudnn]
    others = first_of_each(c for c in beyond if c.engine is None and not c.is_compiled)
    return list({c.text: c for c in [*candidates.similar(), *first, *others]}.values())


AUTO = Race(
    "auto",
    RaceRules(least_rounds=4, most_rounds=32, batch_ms=0.2, gpu_ms=20.0, gpu_calls=50, warm_ms=0.5),
    narrowed=Shortlist,
    races_models=True,
)
