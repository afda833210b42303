"""Recipes of kernels keep to the shared memory, threads and instructions of a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import assert_compiles
from support.kernels.families import FAMILIES
from support.kernels.grouped import grouped
from support.kernels.random_problems import TAKES, random_problem

from cudnn_autotune import _C, ConvProblem
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.cost_model import occupancy
from cudnn_autotune.kernels.family import KernelFamily
from cudnn_autotune.kernels.sum_parts import sum_launch

KERNELS = [one for one in BUILT_IN if isinstance(one, KernelFamily)]
ON_CUDA_CORES = {"depthwise", "depthwise_1d", "depthwise_planes", "depthwise_wgrad"}
AT_LAUNCH = {
    "depthwise_1d",
    "depthwise_planes",
    "depthwise_wgrad",
    "few_filters",
    "implicit_gemm_1d",
}
"""The kernels to which the layout of shared memory comes with the arguments of a launch, or which
use none."""
TENSOR_CORES = ("a100", "l4", "h200")
MIN_BLOCKS = ("MIN_BLOCKS", "BLOCKS")
"""The macros by which kernels ask for so many blocks on a multiprocessor."""


def problems(family: str, count: int = 60) -> list[ConvProblem]:
    rng = random.Random(family)
    return [random_problem(rng, kind) for kind in TAKES[family] for _ in range(count)]


@pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
def test_sums_of_as_many_weights_as_a_tensor_may_have() -> None:
    """The last block's threads reach beyond 2^31. All blocks before the last two are left out."""
    launch = sum_launch(grouped("wgrad", (2, 8, 8), 2, 8), 1)
    count, of_block = 2**31 - 3, 96
    defines = {**dict(launch.kernel.defines), "NUMBERS": 1, "PARTS": 1, "COLUMNS": of_block // 32}
    blocks = -(-count // of_block)
    assert blocks * of_block > 2**31
    first = (blocks - 2) * of_block
    sums, result = torch.arange(2.0 * of_block), torch.zeros(2 * of_block, dtype=torch.float16)
    large = replace(
        launch,
        kernel=replace(launch.kernel, defines=tuple(defines.items())),
        grid=(blocks, 1, 1),
        block=(of_block, 1, 1),
        arguments=(Address("workspace", -4 * first), Address("w", -2 * first), 1, count),
    )
    buffers = {"workspace": sums, "w": result}
    cuda_emulation.launch_kernel(large, buffers, first_block=blocks - 2)
    places = torch.arange(first, first + 2 * of_block)
    assert torch.equal(result, torch.where(places < count, sums.half(), 0))


@pytest.mark.parametrize("family", KERNELS, ids=lambda one: one.name)
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
        threads = math.prod(launch.block)
        assert launch.shared_bytes <= gpu.shared_bytes
        assert threads <= 1024
        asked = [int(n) for name, n in launch.kernel.defines if name in MIN_BLOCKS]
        for blocks in asked:
            assert blocks >= 1
            assert blocks * -(-threads // 32) * 32 <= gpu.sm_threads
            shared = launch.shared_bytes + gpu.reserved_shared_bytes
            assert blocks * shared <= gpu.sm_shared_bytes
    assert bool(launches) == (gpu.compute_capability >= family.min_capability)


@pytest.mark.parametrize("family", KERNELS, ids=lambda one: one.name)
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


@pytest.mark.search
@pytest.mark.basic(4)
@pytest.mark.parametrize(
    ("name", "problem"),
    [(name, problem) for name, family in FAMILIES.items() for problem in family.compiled],
    ids=lambda value: getattr(value, "text", value),
)
def test_every_offer_compiles_for_one_of_its_gpus(name: str, problem: ConvProblem) -> None:
    family = FAMILIES[name].kernel
    gpus = [gpu for gpu in map(gpu_of, TENSOR_CORES) if family.offers(problem, gpu)]
    assert gpus
    drawn = random.Random(problem.text).sample(gpus, len(gpus))
    for place, gpu in enumerate(drawn):
        for offer in family.offers(problem, gpu)[place :: len(gpus)]:
            recipe = family.recipe(problem, offer.settings, gpu)
            assert_compiles(recipe, gpu.compute_capability)


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", sorted(ON_CUDA_CORES))
@pytest.mark.parametrize("gpu_name", ["l4", "t4"])
def test_kernels_compile_for_older_gpus(name: str, gpu_name: str) -> None:
    """A T4 has no cp.async and no conversion to bfloat16."""
    gpu = gpu_of(gpu_name)
    (family,) = [one for one in KERNELS if one.name == name]
    seen = set()
    for problem in problems(name, 1500):
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


@pytest.mark.parametrize("family", KERNELS, ids=lambda one: one.name)
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
