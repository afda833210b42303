"""The candidates of a problem, as one list and as sampling modes query them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.engines.candidate_id import identify, parse
from cudnn_autotune.engines.configs import (
    HEURISTIC_MODES,
    OWN_PATH,
    Candidate,
    Device,
    check_engine_text,
    check_workspace_limit,
    described,
    open_search,
    parse_engine_text,
    query,
)
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.unlisted import MATMUL, other_kernels, without_cudnn

_UNLISTED_RANK = 10_000

# cuDNN takes 3 to 5 ms to answer. A problem has several queries: to serve a first call at once, to
# compile ahead, to search. So the last answers are kept.
_MOST_ANSWERS = 512
_answers: OrderedDict[Hashable, Sequence[Candidate]] = OrderedDict()
_lock = ForkSafeLock()


def candidates(
    problem: ConvProblem,
    device: Device = "cuda",
    *,
    workspace_limit: int | None = None,
    filtered: bool = True,
) -> list[Candidate]:
    """Returns the engine configs that cuDNN's heuristics list for ``problem``, best guess first,
    and after them the offers of the registered implementations.

    Modes A, B and FALLBACK follow in this order, with each config once. No candidate is built or
    run, so it may fail to build later. If only a bias follows the convolution, configs that add it
    alternate with configs of the convolution alone (``Candidate.is_unfused``). The candidates of
    implementations have no ``engine``. PyTorch's own path, ``"aten"``, competes too, and is not
    listed here.

    Without the CUDA driver's library, ``libcuda.so.1``, cuDNN does not list the engines that it
    compiles at run time. The log says so once. From 9.28 on it then takes no property file. A
    library of this name with empty functions of the driver's names is enough.

    Args:
        problem: the convolution.
        device: a CUDA device, or the property file of a GPU that need not be here (cuDNN 9.8 and
            later). A file is a shipped one's name (``"h200"``, ``"h100"``, ``"a100"``, ``"l4"``,
            ``"t4"``) or a path.
        workspace_limit: the most bytes of workspace that a candidate may need; None: no limit.
        filtered: whether to leave out candidates that PyTorch would leave out. These convert inputs
            to a narrower type, use tensor cores for float32 without TF32, or are not deterministic
            where ``problem`` asks for it.

    Raises:
        TypeError: ``problem`` is not a ConvProblem.
        ValueError: the device is unknown, cuDNN does not take the property file, or
            ``workspace_limit`` is negative.
        CudnnError: cuDNN has no graph for the problem.
    """
    check_workspace_limit(workspace_limit)
    search = open_search(problem, device)
    listed = query(search, problem, workspace_limit=workspace_limit, filtered=filtered)
    offered = offers_of(problem, gpu_of(device), workspace_limit=workspace_limit, filtered=filtered)
    return [*listed, *offered]


def is_one_plan_in_pytorch(problem: ConvProblem) -> bool:
    """Returns whether one plan of cuDNN can be PyTorch's own path, but for a bias. PyTorch computes
    a residual, an activation and padding that differs before and after by further kernels."""
    n = problem.spatial_dims
    is_padded_evenly = problem.padding[:n] == problem.padding[n:]
    return is_padded_evenly and not (problem.residual or problem.activation)


def named(text: str, rank: int = 0) -> Candidate:
    """Returns the candidate of any kind that a text names, without workspace and notes. It need not
    exist for any problem.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: ``text`` names no candidate.
    """
    check_engine_text(text)
    for known in (OWN_PATH, MATMUL):
        if text == known.text:
            return known
    if identify(text).is_implementation:
        parse(text)
        return Candidate(None, {}, 0, (), (), text, "", rank)
    return Candidate(*parse_engine_text(text), 0, (), (), text, "", rank)


class QueriedCandidates:
    """The candidates of one search on a GPU of this machine, queried from cuDNN mode by mode.

    Args:
        search: cuDNN's engines for ``problem``.
        operands: on the search's device.
        workspace_limit: the most bytes of workspace; None: no limit.
        chosen_nearby: the choices for similar problems, the nearest first.
        gpu: the GPU for the implementations' offers; None: the operands' GPU, if they are on one.
    """

    def __init__(
        self,
        search: _C.EngineList,
        problem: ConvProblem,
        operands: Operands,
        workspace_limit: int | None = None,
        chosen_nearby: Sequence[Candidate] = (),
        gpu: Gpu | None = None,
    ) -> None:
        self.problem = problem
        self._nearby = [c.text for c in chosen_nearby if not c.id.is_own_path]
        self._operands = operands
        if gpu is None and operands and operands[0].is_cuda:
            gpu = gpu_of(operands[0].device)
        self._without_cudnn = cache(partial(without_cudnn, problem, gpu, workspace_limit))
        self._describe: Callable[[str], Candidate | None] = lambda text: described(
            search, problem, text, _UNLISTED_RANK, workspace_limit=workspace_limit
        )
        self._search = search
        self._workspace_limit = workspace_limit
        self._key = None if gpu is None else (problem, gpu, workspace_limit)
        self._by_mode: dict[str, Sequence[Candidate]] = {}

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        if heuristic_mode not in self._by_mode:
            self._by_mode[heuristic_mode] = self._answer(heuristic_mode)
        return self._by_mode[heuristic_mode]

    def _answer(self, mode: str) -> Sequence[Candidate]:
        if self._key is None:
            return self._ask(mode)
        # The answer leaves out candidates that were listed for other modes before.
        key = (*self._key, *self._by_mode, mode)
        with _lock:
            if key in _answers:
                _answers.move_to_end(key)
                return _answers[key]
        answer = self._ask(mode)
        with _lock:
            _answers[key] = answer
            while len(_answers) > _MOST_ANSWERS:
                _answers.popitem(last=False)
        return answer

    def _ask(self, mode: str) -> Sequence[Candidate]:
        limit, known = self._workspace_limit, self._listed()
        return query(self._search, self.problem, [mode], workspace_limit=limit, known=known)

    def _listed(self) -> dict[str, Candidate]:
        return {c.text: c for some in self._by_mode.values() for c in some}

    def all(self) -> Sequence[Candidate]:
        return [c for mode in HEURISTIC_MODES for c in self.of_mode(mode)]

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates without an engine (PyTorch's own path and others), and other
        kernels of the engines of modes A and FALLBACK. Mode B counts if it was asked before: its
        query takes long."""
        self.of_mode("A")
        self.of_mode("FALLBACK")
        return [*self._without_cudnn(), *other_kernels(self._listed().values())]

    def similar(self) -> Sequence[Candidate]:
        """Returns candidates as listed by an earlier query or offered; else as cuDNN describes
        their text, ranked behind all listed ones. An implementation has other settings for other
        sizes: its best guess replaces settings that it does not offer. Absent and forbidden
        candidates are left out."""
        listed = self._listed()
        found = (listed.get(text) or self._unlisted(text) for text in self._nearby)
        return list({c.text: c for c in found if c is not None}.values())

    def _unlisted(self, text: str) -> Candidate | None:
        named = identify(text)
        if named.is_implementation:
            alike = [c for c in self._without_cudnn() if c.id[:3] == named[:3]]
            return next((c for c in alike if c.text == text), alike[0] if alike else None)
        return self._describe(text)

    @property
    def aten_uses_cudnn(self) -> bool:
        problem, n = self.problem, self.problem.spatial_dims
        if not is_one_plan_in_pytorch(problem):
            return False
        # A bias is added by a kernel of PyTorch's here too, as behind the first of mode A.
        backend = torch._C._select_conv_backend(
            *self._operands[:2],
            None,
            problem.stride,
            problem.padding[:n],
            problem.dilation,
            False,
            (0,) * n,
            problem.groups,
            None,
        )
        return str(backend).endswith(".Cudnn")
