"""Recipes of kernels keep to the shared memory, threads and instructions of a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from cuda_emulation.checks import assert_compiles
from random_problems import TAKES, random_problem

from cudnn_autotune import _C, ConvProblem
from cudnn_autotune.engines.built_in import BUILT_IN
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.kernels.family import KernelFamily, occupancy
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch

FAMILIES = [one for one in BUILT_IN if isinstance(one, KernelFamily)]
ON_CUDA_CORES = {"depthwise", "depthwise_planes", "depthwise_wgrad"}
AT_LAUNCH = {"depthwise_planes", "depthwise_wgrad"}
"""The kernels to which the layout of shared memory comes with the arguments of a launch."""
MIN_BLOCKS = ("MIN_BLOCKS", "BLOCKS")
"""The macros by which kernels ask for so many blocks on a multiprocessor."""


def problems(family: str, count: int = 60) -> list[ConvProblem]:
    rng = random.Random(family)
    return [random_problem(rng, kind) for kind in TAKES[family] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
@pytest.mark.parametrize("gpu_name", ["a100", "h100", "h200", "l4", "t4"])
def test_launches_fit_the_gpu(family: KernelFamily, gpu_name: str) -> None:
    gpu = gpu_of(gpu_name)
    launches = [
        launch
        for problem in problems(family.name)
        for offer in family.offers(problem, gpu)
        for launch in family.recipe(problem, offer.settings, gpu).launches
    ]
    for launch in launches:
        assert isinstance(launch, KernelLaunch)
        assert isinstance(launch.kernel, Kernel)
        threads = math.prod(launch.block)
        assert launch.shared_bytes <= gpu.shared_bytes
        assert threads <= 1024
        asked = [int(n) for name, n in launch.kernel.defines if name in MIN_BLOCKS]
        for blocks in asked:
            assert blocks >= 1
            assert blocks * -(-threads // 32) * 32 <= gpu.sm_threads
            shared = launch.shared_bytes + gpu.reserved_shared_bytes
            assert blocks * shared <= gpu.sm_shared_bytes
    assert bool(launches) == (gpu_name != "t4" or family.name in ON_CUDA_CORES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_a_kernel_refuses_less_shared_memory_than_its_layout_needs(family: KernelFamily) -> None:
    """The planner counts the bytes; the kernel does not compile if they are too few."""
    gpu = gpu_of("h100")
    kernels = [
        launch.kernel
        for problem in problems(family.name)
        for offer in family.offers(problem, gpu)
        for launch in family.recipe(problem, offer.settings, gpu).launches
        if isinstance(launch, KernelLaunch)
        and isinstance(launch.kernel, Kernel)
        and dict(launch.kernel.defines).get("SHARED_BYTES") == launch.shared_bytes
    ]
    assert bool(kernels) == (family.name not in AT_LAUNCH)
    for kernel in random.Random(0).sample(kernels, min(2, len(kernels))):
        defines = dict(kernel.defines)
        defines["SHARED_BYTES"] = int(defines["SHARED_BYTES"]) - 16
        with pytest.raises(_C.PlanError, match=r"(?s)static assert|static_assert"):
            cubin(replace(kernel, defines=tuple(defines.items())), (9, 0))


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", sorted(ON_CUDA_CORES))
@pytest.mark.parametrize("gpu_name", ["a100", "l4", "t4"])
def test_kernels_compile_for_older_gpus(name: str, gpu_name: str) -> None:
    """A T4 has no cp.async and no conversion to bfloat16."""
    gpu = gpu_of(gpu_name)
    (family,) = [one for one in FAMILIES if one.name == name]
    seen = set()
    for problem in problems(name, 300):
        for offer in family.offers(problem, gpu)[:1]:
            if (problem.op, problem.dtype) not in seen:
                seen.add((problem.op, problem.dtype))
                recipe = family.recipe(problem, offer.settings, gpu)
                assert_compiles(recipe, gpu.compute_capability)
    assert torch.bfloat16 in {dtype for _, dtype in seen}


@pytest.mark.parametrize(
    ("gpu_name", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("h100", 256, 32, 0, 8),
        ("l4", 256, 32, 0, 6),
        ("t4", 256, 32, 0, 4),
        ("h100", 256, 65, 0, 3),
        ("h100", 128, 32, 75 << 10, 3),
        ("t4", 128, 32, 32 << 10, 2),
        ("l4", 128, 32, 49 << 10, 2),
        ("a100", 40, 255, 0, 4),
    ],
)
def test_occupancy(
    gpu_name: str, threads: int, registers: int, shared_bytes: int, blocks: int
) -> None:
    assert occupancy(gpu_of(gpu_name), threads, registers, shared_bytes) == blocks


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_settings_that_are_not_offered_are_an_error_that_lists_what_is(
    family: KernelFamily,
) -> None:
    gpu = gpu_of("h200")
    for problem in problems(family.name):
        offered = [offer.settings for offer in family.offers(problem, gpu)]
        allowed = " or ".join(offered) or "none"
        for wrong in {"WRONG=1", "", f"{allowed},WRONG=1"} - set(offered):
            with pytest.raises(ValueError) as raised:
                family.recipe(problem, wrong, gpu)
            assert str(raised.value) == (
                f"settings: {family.name} does not offer {wrong!r} for {problem.text}; "
                f"allowed are {allowed}"
            )
