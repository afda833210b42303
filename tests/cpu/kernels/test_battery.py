"""What each kernel family is tested for, in the emulation of CUDA."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.battery import TINY, Family
from support.kernels.families import FAMILIES
from torch import Tensor

from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels import hopper
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.family import KernelFamily

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)


def problems(field: Callable[[Family], Sequence[ConvProblem]]) -> pytest.MarkDecorator:
    """Parametrizes a test by the families and their problems in a field."""
    return pytest.mark.parametrize(
        ("family", "problem"),
        [
            pytest.param(family, problem, id=f"{name}-{problem.text}")
            for name, family in FAMILIES.items()
            for problem in field(family)
        ],
    )


def test_every_kernel_family_is_tested() -> None:
    built_in = {one.name for one in BUILT_IN if isinstance(one, KernelFamily)}
    assert {family.kernel.name for family in FAMILIES.values()} == built_in


@pytest.mark.basic(4, of="family")
@emulated
@problems(lambda family: [*family.layers, *family.edges])
def test_layers(family: Family, problem: ConvProblem) -> None:
    """The first offer and others, in one order of threads or the other."""
    runs = []
    for gpu in family.gpus:
        first, *others = found = family.settings_of(problem, gpu)
        assert len(found) in family.offers
        assert len(set(found)) == len(found)
        drawn = random.Random(problem.text).sample(others, min(family.most - 1, len(others)))
        runs += [(gpu, settings) for settings in (first, *drawn)]
    WORK.matrices = WORK.conflicts = 0
    for i, (gpu, settings) in enumerate(runs if len(runs) > 1 else 2 * runs):
        check(family.kernel, problem, settings, gpu=gpu, is_reversed=bool(i % 2))
    if problem in family.layers and not family.has_conflicts:
        assert WORK.conflicts == 0, "what is loaded together lies in the same banks"
        assert WORK.matrices > 0


@pytest.mark.basic(1, of="family")
@emulated
@problems(lambda family: family.every_offer)
def test_every_offer(family: Family, problem: ConvProblem) -> None:
    found = family.settings_of(problem, family.gpus[-1])
    assert 2 <= len(set(found)) == len(found)
    for i, settings in enumerate(found):
        check(family.kernel, problem, settings, gpu=family.gpus[-1], is_reversed=bool(i % 2))


@pytest.mark.basic(2, of="family")
@emulated
@problems(lambda family: family.epilogues)
def test_epilogues(family: Family, problem: ConvProblem) -> None:
    check(family.kernel, problem, family.settings_of(problem)[0])


@pytest.mark.basic(1, of="family")
@emulated
@problems(lambda family: family.few_blocks)
def test_a_block_goes_over_several_tiles(family: Family, problem: ConvProblem) -> None:
    """A GPU with one multiprocessor has few blocks, so buffers are used again."""
    for settings in family.settings_of(problem, TINY):
        launch = family.kernel.recipe(problem, settings, TINY).launches[0]
        assert family.blocks_and_tiles is not None
        blocks, tiles = family.blocks_and_tiles(launch)
        assert 1 <= blocks < tiles  # type: ignore[operator]
        for is_reversed in (False, True):
            check(family.kernel, problem, settings, gpu=TINY, is_reversed=is_reversed)


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_random_shapes(family: Family) -> None:
    choose = random.Random(0)
    seed, drawn = 0, 0
    while seed < family.draws:
        assert drawn < 10 * family.draws, "few of what is drawn is offered"
        drawn += 1
        try:
            problem = family.draw(choose)
        except ValueError:  # the filters do not fit into the image
            continue
        gpu = choose.choice(family.gpus)
        if found := family.settings_of(problem, gpu):
            settings, is_reversed = choose.choice(found[: family.most]), bool(seed % 2)
            check(family.kernel, problem, settings, gpu=gpu, is_reversed=is_reversed, seed=seed)
            seed += 1


def spoil(tensor: Tensor, shares: Sequence[float]) -> None:
    """Writes infinities and NaN into some images, channels and pixels of a tensor, at these shares
    of their numbers: 0 is the first one, and 1 the last one."""
    values = (torch.inf, torch.nan, -torch.inf, torch.inf)
    for value, share in zip(values, shares, strict=False):
        tensor[tuple(int(share * (size - 1)) for size in tensor.shape)] = value


@pytest.mark.basic(3, of="family")
@emulated
@problems(lambda family: family.spoilt)
def test_what_is_not_finite_goes_where_it_belongs(family: Family, problem: ConvProblem) -> None:
    """In the corners, where zeros beyond images and between strips meet it, and inside."""
    forward = (0.0, 1 / 2, 1 / 3, 1.0)
    for gpu in family.gpus:
        for settings in family.settings_of(problem, gpu)[: family.most]:
            for name in {"fprop": "x", "dgrad": "y", "wgrad": "xy"}[problem.op]:
                for shares in ((0.0, 1.0), (0.5,)) if problem.op == "wgrad" else (forward,):
                    tensors = random_tensors(problem)
                    spoil(tensors[name], shares)
                    check_not_finite(family.kernel, problem, settings, tensors, gpu=gpu)


@problems(lambda family: family.not_computed)
def test_what_is_not_computed_is_not_offered(family: Family, problem: ConvProblem) -> None:
    assert not family.settings_of(problem)


@pytest.mark.parametrize("gpu_name", ["h200", "l4"])
@problems(lambda family: family.large)
def test_all_blocks_are_on_the_gpu_at_once(
    family: Family, problem: ConvProblem, gpu_name: str
) -> None:
    gpu = gpu_of(gpu_name)
    found = family.kernel.offers(problem, gpu)
    assert found
    for offer in found:
        recipe = family.kernel.recipe(problem, offer.settings, gpu)
        assert recipe.workspace_bytes == offer.workspace_bytes
        assert bool(recipe.workspace_bytes) == (problem.op == "wgrad")
        launch = recipe.launches[0]
        defines = dict(launch.kernel.defines)
        blocks = int(defines.get("MIN_BLOCKS") or defines["BLOCKS"])
        assert blocks * (launch.shared_bytes + gpu.reserved_shared_bytes) <= gpu.sm_shared_bytes
        assert math.prod(launch.grid) <= blocks * gpu.multiprocessors


@pytest.mark.parametrize(
    "family",
    [one for one in FAMILIES.values() if type(one.kernel).__module__.startswith(hopper.__name__)],
    ids=lambda family: family.kernel.name,
)
def test_other_gpus_lack_the_instruction_of_a_warpgroup(family: Family) -> None:
    for gpu in (*map(gpu_of, ("a100", "l4", "t4")), replace(H200, compute_capability=(10, 0))):
        assert not any(family.settings_of(problem, gpu) for problem in family.layers)
