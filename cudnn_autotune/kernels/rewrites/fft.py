"""Depthwise convolutions of one dimension with long filters, as products of spectra."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import PythonLaunch, Recipe
from cudnn_autotune.kernels.sources import version_of

_LEAST_TAPS = {torch.float16: 130, torch.bfloat16: 130, torch.float32: 64}
"""The fewest taps by type. ``depthwise_mma`` computes fewer in 16 bits."""
_PRODUCTS_PER_S = 3.2e12
"""Products a second of cuDNN's direct kernels, as measured on an H100 with 1025 taps."""
_BYTES_PER_S = 3e12
_BYTES_OF_AN_ELEMENT = 48
"""Estimated bytes of transforms' reads and writes for each element of a row, padded."""
_LAUNCHES_S = 35e-6
"""Estimated seconds of some ten launches."""


class Fft:
    """Products of the rows' spectra, which PyTorch's functions compute in float32.

    Rows are images' channels. Let X, W and Y be the spectra of x, w and y. x begins behind the
    padding, and enough zeros follow each row that it does not wrap around. Then y is ``X conj(W)``
    transformed back, x's gradient is ``Y W``, and w's is the sum of ``X conj(Y)`` over the images.

    An error is relative to the largest numbers of a row, and not to each number of the result. A
    NaN or infinity spreads to the whole row; from a filter, to the channel in all images. The note
    is cuDNN's for its engines of this kind.

    Allocations of PyTorch's functions count as workspace. cuFFT plans a transform of a new size in
    its first call, which must not be captured into a CUDA graph.
    """

    name = "fft"
    version = version_of(__name__)
    calls_python = True
    """The answer of ``registry.calls_python``."""

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        if not _is_computed(problem) or not _is_faster(problem):
            return ()
        return (Offer("", _allocated_bytes(problem), ("FFT",), ()),)

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        if settings or not self.offers(problem, gpu):
            raise ValueError(
                f"settings must be one that {self.name} offers for {problem.text}, got {settings!r}"
            )
        return Recipe((PythonLaunch(functools.partial(_compute, problem)),))


def _is_computed(problem: ConvProblem) -> bool:
    channels, taps = problem.input_shape[1], problem.weight_shape[-1]
    return (
        problem.spatial_dims == 1
        and problem.groups == channels == problem.weight_shape[0]
        and problem.stride == problem.dilation == (1,)
        and taps >= _LEAST_TAPS.get(problem.dtype, math.inf)
        and max(problem.padding) < taps
        and not problem.residual
        and not problem.activation
    )


def _is_faster(problem: ConvProblem) -> bool:
    """Returns whether a direct kernel has a longer estimate."""
    rows = problem.input_shape[0] * problem.input_shape[1]
    direct = rows * problem.output_shape[2] * problem.weight_shape[2] / _PRODUCTS_PER_S
    moved = rows * _length(problem) * _BYTES_OF_AN_ELEMENT
    return direct > _LAUNCHES_S + moved / _BYTES_PER_S


def _length(problem: ConvProblem) -> int:
    """Returns the number of elements of a padded row: one without large factors.

    With padding p before and p' behind a row of L elements, elements that wrap around in L + max(p,
    p') elements are zeros, or not in the result. A filter, which may be longer, fits too.
    """
    needed = max(problem.input_shape[2] + max(problem.padding), problem.weight_shape[2])
    return min(factor << (-(-needed // factor) - 1).bit_length() for factor in (1, 3, 5, 7, 9))


def _allocated_bytes(problem: ConvProblem) -> int:
    """Estimates PyTorch's most allocated bytes at a time in a call. They are, of the larger
    operand, the padded rows, their spectrum, a copy of it and the transform back; and half of these
    of the other operand."""
    n, channels = problem.input_shape[:2]
    others = n * channels if problem.op == "wgrad" else channels
    return (4 * n * channels + 2 * others) * 4 * (_length(problem) + 2)


def _compute(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *others: Tensor) -> None:
    """Computes a problem, as a :class:`PythonLaunch`."""
    length, before = _length(problem), problem.padding[0]

    def spectrum(rows: Tensor, begin: int = 0, norm: str = "backward") -> Tensor:
        longer = rows.new_zeros((*rows.shape[:-1], length), dtype=torch.float32)
        longer[..., begin : begin + rows.shape[-1]] = rows
        return torch.fft.rfft(longer, norm=norm)

    if problem.op == "wgrad":
        product = spectrum(x, before).mul_(spectrum(y).conj_physical_()).sum(0)
        w.copy_(torch.fft.irfft(product, length)[:, None, : w.shape[2]])
        return
    # The filters' small spectrum is divided by the length, and not the result.
    filters = spectrum(w[:, 0], norm="forward")
    if problem.op == "dgrad":
        product = spectrum(y).mul_(filters)
        whole = torch.fft.irfft(product, length, norm="forward")
        x.copy_(whole[..., before : before + x.shape[2]])
        return
    product = spectrum(x, before).mul_(filters.conj_physical_())
    whole = torch.fft.irfft(product, length, norm="forward")[..., : y.shape[2]]
    if problem.bias:
        whole += others[0][:, None]
    y.copy_(whole)
