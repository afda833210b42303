"""Every CUDA source of the package compiles by NVRTC for GPUs that this machine need not have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.kernels.random_problems import TAKES, random_problem

import cudnn_autotune
from cudnn_autotune import _C
from cudnn_autotune.compile.weights import operators
from cudnn_autotune.core import nvrtc
from cudnn_autotune.engines import compiled_kernels
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.norms.plan import NormProblem, plan_norm

pytestmark = pytest.mark.search

CAPABILITIES = {"a100": (8, 0), "h200": (9, 0)}
BY_NAME = {one.name: one for one in BUILT_IN}
WITHOUT_KERNELS = {"fft"}
"""Implementations whose recipes launch no kernel of this package."""
FORWARD = NormProblem(False, torch.float16, torch.float32, 8, 64, 196, False, 16, "relu")
NORMS = {
    "batch norm": FORWARD,
    "batch norm of planes": replace(FORWARD, planes=True),
    "group norm": replace(FORWARD, planes=True, groups=8, batch=8, parameters=torch.float16),
    "backward": replace(FORWARD, is_backward=True),
    "backward of planes": replace(FORWARD, is_backward=True, planes=True),
}
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        nvrtc.version()
    except _C.PlanError as error:
        pytest.skip(str(error))


def drawn(one: Implementation, gpu_name: str) -> Iterator[tuple[str, torch.dtype, Kernel]]:
    """The kernels of first offers for random problems, with the problems' operations and dtypes."""
    gpu, rng = gpu_of(gpu_name), random.Random(one.name)
    for kind in TAKES[one.name]:
        for _ in range(150):
            problem = random_problem(rng, kind)
            for offer in one.offers(problem, gpu)[:1]:
                for launch in one.recipe(problem, offer.settings, gpu).launches:
                    if isinstance(launch, KernelLaunch) and isinstance(launch.kernel, Kernel):
                        yield problem.op, problem.dtype, launch.kernel


def is_offered(name: str, gpu_name: str) -> bool:
    return CAPABILITIES[gpu_name] >= getattr(BY_NAME[name], "min_capability", (0, 0))


CASES = [
    (name, gpu_name)
    for name in BY_NAME
    for gpu_name in CAPABILITIES
    if name not in WITHOUT_KERNELS and is_offered(name, gpu_name)
]


@pytest.mark.parametrize(("name", "gpu_name"), CASES)
def test_kernels_of_convolutions(name: str, gpu_name: str) -> None:
    """Each function's operations and dtypes, each at least once."""
    compiled: set[object] = set()
    for op, of, kernel in drawn(BY_NAME[name], gpu_name):
        cases: set[object] = {(kernel.function, op), (kernel.function, of)}
        if not cases <= compiled:
            compiled |= cases
            assert cubin(kernel, CAPABILITIES[gpu_name])
    assert compiled


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu_name"), CASES)
def test_kernels_of_all_dtypes(name: str, gpu_name: str) -> None:
    chosen = {
        (op, kernel.function, of): kernel for op, of, kernel in drawn(BY_NAME[name], gpu_name)
    }
    for kernel in chosen.values():
        assert cubin(kernel, CAPABILITIES[gpu_name])


def kernels_of(norm: str, gpu_name: str) -> set[Kernel]:
    """The kernels of the form that is expected to be the fastest."""
    plan = plan_norm(NORMS[norm], gpu_of(gpu_name))
    return {launch.kernel for launch in plan.launches}


@pytest.mark.parametrize("gpu_name", CAPABILITIES)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_of_norms(norm: str, gpu_name: str) -> None:
    for kernel in kernels_of(norm, gpu_name):
        assert cubin(kernel, CAPABILITIES[gpu_name])


@pytest.mark.parametrize("gpu_name", CAPABILITIES)
def test_the_kernel_that_folds_weights(gpu_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CAPABILITIES[gpu_name])
    for folded in HALVES:
        assert operators.kernel_code(0, torch.float32, folded)


def test_no_source_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels above consist of all sources of the package."""
    kernels = {kernel for name in BY_NAME for _, _, kernel in drawn(BY_NAME[name], "h200")}
    kernels |= {kernel for norm in NORMS for kernel in kernels_of(norm, "h200")}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(compiled_kernels, "cubin", lambda kernel, _: kernels.add(kernel) or b"")
    operators.kernel_code(0, torch.float32, torch.float16)
    found = {file for kernel in kernels for file in sources.files_of(kernel.source) if "." in file}
    package = Path(str(cudnn_autotune.__file__)).parent
    assert found == {path.name for path in package.glob("**/*.cu*")}
