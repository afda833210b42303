"""A kernel family as the tests see it: problems by what is tested of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch
from cudnn_autotune.kernels.family import KernelFamily
from support.cuda_emulation.checks import H200

TINY = replace(H200, multiprocessors=1)
"""A GPU whose few blocks go over many tiles."""


def offered_settings(kernel: KernelFamily, problem: ConvProblem, gpu: Gpu) -> list[str]:
    return [offer.settings for offer in kernel.offers(problem, gpu)]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kernel, and problems for each property that ``test_battery.py`` tests it for.

    Problems are small, as an emulation computes them, but for ``large`` and ``compiled``.
    """

    kernel: KernelFamily
    layers: Sequence[ConvProblem]
    """Layers of models."""
    edges: Sequence[ConvProblem] = ()
    """Other shapes, paddings and alignments."""
    every_offer: Sequence[ConvProblem] = ()
    """Problems all offers of which are run."""
    epilogues: Sequence[ConvProblem] = ()
    """Convolutions that are fused with a bias, a residual or an activation."""
    few_blocks: Sequence[ConvProblem] = ()
    """Problems of more tiles than :data:`TINY`'s blocks are, in all offers."""
    spoilt: Sequence[ConvProblem]
    """Problems in which single values are NaN or infinite."""
    patterns: Sequence[ConvProblem]
    """Problems in which many values are."""
    not_computed: Sequence[ConvProblem]
    """Problems that have no offers."""
    large: Sequence[ConvProblem] = ()
    """Problems that fill a GPU with blocks, all of which are there at once."""
    compiled: Sequence[ConvProblem] = ()
    """Problems whose kernels NVRTC compiles, most of them as large as in models."""
    draw: Callable[[random.Random], ConvProblem]
    """Draws a problem; raises ValueError for what is no convolution."""
    draws: int
    """Random problems that are run."""
    gpus: Sequence[Gpu] = (H200,)
    """GPUs for which tilings are planned."""
    most: int = 2
    """Offers of a layer that are run on each of the GPUs: each takes a second to compile."""
    offers: range = range(1, 10)
    """Numbers of offers that a layer may have."""
    has_conflicts: bool = True
    """Whether what is loaded together from shared memory may lie in the same banks."""
    blocks_and_tiles: Callable[[KernelLaunch], tuple[object, object]] | None = None
    """The number of blocks of a launch, and of the tiles that they go over."""
    settings: Callable[[KernelFamily, ConvProblem, Gpu], list[str]] = offered_settings
    """The settings that are meant, of those that are offered."""

    def settings_of(self, problem: ConvProblem, gpu: Gpu = H200) -> list[str]:
        return self.settings(self.kernel, problem, gpu)
