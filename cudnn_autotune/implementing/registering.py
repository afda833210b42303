"""The registration of users' implementations, which then compete with cuDNN's engines, and the
plans of all implementations."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.offers import described, gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.implementing import isolated_run
from cudnn_autotune.implementing.user_implementation import (
    BEHAVIOR_NOTES,
    Build,
    Settings,
    UserImplementation,
)
from cudnn_autotune.tuning import remembering

_log = logging.getLogger(__name__)
_MOST_REPORTED = 1024
_reported: OrderedDict[str, None] = OrderedDict()
"""The last logged texts and errors, each once. Errors may name problems, and a program may have any
number of these."""


def register_implementation(
    name: str,
    *,
    version: str,
    supports: Callable[[ConvProblem], bool],
    settings: Settings = ("",),
    workspace: Callable[[ConvProblem, str], int] | None = None,
    numerical_notes: Sequence[str] = (),
    behavior_notes: Sequence[str] = BEHAVIOR_NOTES,
) -> Callable[[Build], Build]:
    """Returns a decorator that registers a program for convolutions. It competes with cuDNN's
    engines from the next call on, as ``name@version:settings``.

    It decorates ``build(problem, settings)``, which returns a function that computes the problem,
    or a ``recipe.Recipe``. The function is called as ``function(x, w, y, *added, workspace)``.
    These are the forward convolution's input, weight and output, then the bias and the residual of
    a problem that has them, then ``workspace`` (uint8), all on the current GPU. It launches kernels
    on the current stream that write all of y (fprop), x (dgrad) or w (wgrad), and returns nothing.
    It runs in each call of the convolution, also while a CUDA graph is captured. ``build`` may be
    called on any thread. It must not run convolutions of this package: they could wait for a search
    that waits for it.

    All choices of this process are forgotten, as by :func:`forget`. Stored decisions serve all the
    same: only a new search (``cudnn-autotune tune --retune``, a store in the mode ``retune``)
    compares them with the implementation. docs/how-to/own-implementation.md has examples, and the
    protection from wrong implementations.

    Args:
        name: an identifier in lower case, of at most 64 characters.
        version: printable ASCII without blanks, ``:`` and ``@``. Choices are remembered under it,
            so it must change with ``build`` and its kernels.
        supports: ``supports(problem)``: whether a :class:`ConvProblem` is computed. It is called in
            every search, so it must be quick. If it raises, the implementation is left out, which
            is logged.
        settings: texts without blanks, the best guess first, each a candidate of its own; or
            ``settings(problem)``, which returns them.
        workspace: ``workspace(problem, settings)``: bytes of workspace that a function needs; None:
            none. A recipe has them itself.
        numerical_notes: properties of the output: ``"NONDETERMINISTIC"`` (its bits may differ from
            run to run), ``"TENSOR_CORE"`` (it rounds float32 to TF32),
            ``"REDUCED_PRECISION_REDUCTION"`` (it sums in half precision). A problem that forbids
            one of them is not offered.
        behavior_notes: ``("RUNTIME_COMPILATION",)`` if ``build`` compiles, and should run on a
            background thread if possible; else ``()``.

    Raises:
        TypeError, ValueError: an argument is not allowed, or an implementation of this name is
            registered. The decorator raises.
    """

    def register(build: Build) -> Build:
        notes = {"numerical_notes": numerical_notes, "behavior_notes": behavior_notes}
        own = UserImplementation(name, version, supports, build, settings, workspace, **notes)
        registry.register(own)
        remembering.forget()
        return build

    return register


def unregister_implementation(name: str) -> None:
    """Removes an implementation, a user's or one of the package (docs/reference/implementations.md
    names them). All choices of this process are forgotten, as by :func:`forget`.

    Decisions for it stay in the store. While it is not registered, the next best candidate of each
    of them serves.

    Raises:
        KeyError: no implementation of this name is registered.
    """
    registry.unregister(name)
    isolated_run.forget(name)
    remembering.forget()


def build(native: _C.ConvProblem, text: str, device: int) -> _C.Plan:
    """Builds the plan of an implementation's candidate (a ``_C.PlanBuilder``). A user's candidate
    first runs in another process.

    Raises:
        ValueError: ``text`` does not parse.
        ImplementationError: the implementation is not registered, in this version, does not offer
            this for the problem, does harm (see ``isolated_run``), or does not build.
        PlanError: a part of it does not build.
    """
    problem, gpu = ConvProblem.from_native(native), gpu_of(device)
    described(text, problem, gpu)
    isolated_run.check(text, problem, device)
    try:
        return recipe_plan(problem, text, recipe_of(text, problem, gpu), device)
    except Exception as error:
        # A search leaves it out silently, since many engines do not build. Without NVRTC all
        # kernels fail for one reason, which is logged once.
        known = (text, str(error))
        if not any(one in _reported for one in known):
            _log.warning("%s does not build; first for %s: %s", text, problem.text, error)
        _reported.update(dict.fromkeys(known))
        while len(_reported) > _MOST_REPORTED:
            _reported.popitem(last=False)
        raise
