"""Recipes of kernels keep to the shared memory, threads and instructions of a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import assert_compiles
from support.kernels.depthwise_layers import depthwise
from support.kernels.first_layers import first_layer
from support.kernels.grouped_layers import problem as grouped
from support.kernels.random_problems import TAKES, random_problem

from cudnn_autotune import _C, ConvProblem
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.family import KernelFamily, occupancy
from cudnn_autotune.kernels.sum_parts import sum_launch

FAMILIES = [one for one in BUILT_IN if isinstance(one, KernelFamily)]
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


BF16, FP32 = torch.bfloat16, torch.float32
PLAIN = {"memory_format": torch.contiguous_format}
TF32 = {"dtype": FP32, "allow_tf32": True}
ALL_FUSED: dict[str, Any] = {"bias": True, "residual": True, "activation": "silu"}
LAYERS = [  # most of them as large as in models
    depthwise("fprop", 96, (28, 28), (3, 3), stride=2, padding=1),
    depthwise("dgrad", 96, (28, 28), (5, 5), dtype=BF16, stride=2, padding=2),
    depthwise("fprop", 12, (1, 280), (1, 31), dtype=FP32, padding=(0, 15), **PLAIN),
    depthwise("dgrad", 6, (8, 8, 8), (3, 3, 3), dtype=BF16, stride=2, **PLAIN),
    depthwise("fprop", 9, (9, 9), (3, 3), dtype=BF16, **ALL_FUSED),
    depthwise("fprop", 672, (14, 14), (5, 5), n=64, stride=2, padding=2),
    depthwise("dgrad", 144, (56, 56), (5, 5), n=64, stride=2, padding=2, dtype=BF16),
    depthwise("fprop", 96, (112, 112), (3, 3), n=64, stride=2, padding=1, dtype=FP32),
    depthwise("fprop", 96, (56, 56), (3, 3), padding=1, bias=True, activation="silu"),
    depthwise("fprop", 96, (56, 56), (7, 7), n=64, padding=3, **ALL_FUSED),
    depthwise("dgrad", 128, (56, 56), (31, 31), n=64, padding=15, dtype=BF16),
    depthwise("fprop", 96, (56, 56), (7, 7), n=64, padding=3, **PLAIN),
    depthwise("fprop", 512, (1001,), (31,), n=32, padding=15),
    depthwise("fprop", 512, (1001,), (4,), dtype=BF16, padding=3, **ALL_FUSED),
    depthwise("wgrad", 96, (112, 112), (3, 3), n=64, stride=2, padding=1),
    depthwise("wgrad", 96, (56, 56), (7, 7), n=64, padding=3, dtype=FP32),
    depthwise("wgrad", 54, (16, 56, 56), (3, 3, 3), n=8, padding=1),
    depthwise("wgrad", 96, (56, 56), (7, 7), n=64, padding=3),
    depthwise("wgrad", 128, (56, 56), (31, 31), n=8, padding=15, dtype=BF16),
    depthwise("wgrad", 512, (1000,), (31,), n=16, padding=15),
    grouped("fprop", (64, 14, 14), 24, 24),
    grouped("fprop", (64, 14, 14), 24, 24, dtype=FP32, bias=True),
    grouped("dgrad", (64, 56, 56), 32, 4, dtype=FP32),
    grouped("dgrad", (64, 56, 56), 4, 16, 1, 2, 0, dtype=FP32),
    grouped("dgrad", (64, 28, 28), 24, 24, 3, 2),
    grouped("fprop", (64, 56, 56), 32, 4, **ALL_FUSED),
    grouped("fprop", (64, 56, 56), 32, 4, activation="elu(2)"),
    grouped("wgrad", (64, 14, 14), 24, 24),
    grouped("wgrad", (64, 14, 14), 24, 24, dtype=FP32),
    first_layer("fprop", (1, 3, 40, 72), (64, 3, 7, 7), 2, 3),
    first_layer("fprop", (1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
    first_layer("fprop", (1, 3, 15, 39), (32, 3, 3, 3), 2),
    first_layer("wgrad", (2, 3, 24, 48), (64, 3, 7, 7), 2, 3),
    first_layer("wgrad", (1, 3, 9, 40), (64, 3, 3, 3), 1, 1, dtype=BF16),
    first_layer("wgrad", (1, 3, 15, 39), (32, 3, 3, 3), 2),
    first_layer("wgrad", (1, 3, 15, 39), (32, 3, 3, 3), 2, **TF32),
]


@pytest.mark.search
@pytest.mark.basic(2)
@pytest.mark.parametrize("problem", LAYERS, ids=lambda problem: problem.text)
def test_every_offer_compiles_for_one_of_three_gpus(problem: ConvProblem) -> None:
    draw = random.Random(problem.text)
    compiled = 0
    for family in FAMILIES:
        for place, gpu in enumerate(draw.sample([gpu_of(name) for name in TENSOR_CORES], 3)):
            for offer in family.offers(problem, gpu)[place::3]:
                recipe = family.recipe(problem, offer.settings, gpu)
                assert_compiles(recipe, gpu.compute_capability)
                compiled += 1
    assert compiled


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", sorted(ON_CUDA_CORES))
@pytest.mark.parametrize("gpu_name", ["l4", "t4"])
def test_kernels_compile_for_older_gpus(name: str, gpu_name: str) -> None:
    """A T4 has no cp.async and no conversion to bfloat16."""
    gpu = gpu_of(gpu_name)
    (family,) = [one for one in FAMILIES if one.name == name]
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
