"""Depthwise kernels on CUDA cores, in the emulation of CUDA."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.depthwise_layers import depthwise

from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise import Depthwise
from cudnn_autotune.kernels.depthwise.depthwise_planes import DepthwisePlanes

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

DEPTHWISE, PLANES = Depthwise(), DepthwisePlanes()
CONTIGUOUS = torch.contiguous_format
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def that_computes(problem: ConvProblem) -> Implementation:
    return PLANES if problem.memory_format == CONTIGUOUS else DEPTHWISE


def check_offers(problem: ConvProblem, most: int = 9) -> None:
    """The offers, or ``most`` of them, are right, in one order of threads or the other."""
    implementation = that_computes(problem)
    offers = implementation.offers(problem, H200)
    assert offers, problem.text
    drawn = random.Random(problem.text).sample(offers, min(most, len(offers)))
    for i, offer in enumerate(drawn):
        check(implementation, problem, offer.settings, is_reversed=bool(i % 2))


@pytest.mark.basic(2)
@pytest.mark.parametrize(
    ("c", "size", "kernel", "options"),
    [
        # EfficientNet, MobileNet: stride 2
        (24, (18, 18), (3, 3), {"stride": 2, "padding": 1}),
        (16, (13, 12), (5, 5), {"dtype": BF16, "stride": 2, "padding": 2}),
        # TensorFlow's padding: none before
        (16, (12, 14), (3, 3), {"stride": 2, "padding": (0, 0, 1, 1)}),
        # odd channels: one a thread
        (9, (11, 14), (3, 3), {"padding": 1}),
        (9, (7, 7), (5, 5), {"dtype": FP32, "padding": 2, "stride": 2}),
        # ConvNeXt
        (8, (15, 18), (7, 7), {"dtype": FP32, "padding": 3}),
        # DeepLab
        (16, (11, 10), (3, 3), {"padding": 3, "dilation": (3, 2)}),
        # X3D
        (10, (4, 7, 9), (3, 3, 3), {"padding": 1}),
        (8, (5, 8, 9), (3, 3, 3), {"dtype": FP32, "padding": 1, "stride": 2}),
        (8, (6, 5, 5), (5, 1, 1), {"dtype": BF16, "padding": (2, 0, 0), "stride": (3, 1, 1)}),
        (8, (6, 5, 5), (3, 1, 2), {"dtype": FP32, "dilation": (2, 1, 3), "stride": (2, 1, 1)}),
        # stride above the kernel, below and above it; stride and dilation
        (8, (9, 11), (2, 3), {"dtype": FP32, "stride": (3, 4), "padding": (1, 2)}),
        (8, (16, 17), (3, 4), {"dtype": FP32, "stride": (2, 3), "dilation": (3, 2), "padding": 4}),
        # padding beyond the kernel, an image below it
        (8, (2, 3), (5, 3), {"dtype": FP32, "padding": (6, 5), "stride": (2, 1)}),
        (8, (1, 1), (3, 3), {"padding": 1}),
    ],
)
def test_fixed_shapes(
    c: int, size: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    for op in ("fprop", "dgrad"):
        check_offers(depthwise(op, c, size, kernel, **options), most=2)


@pytest.mark.basic(2)
@pytest.mark.parametrize(
    ("c", "size", "kernel", "options"),
    [
        (3, (9, 16), (3, 3), {"padding": 1}),
        (5, (14, 12), (3, 3), {"stride": 2, "padding": 1}),
        (2, (13, 11), (5, 5), {"dtype": BF16, "stride": 2, "padding": 2}),
        (3, (18, 12), (7, 7), {"dtype": FP32, "padding": 3}),
        # more columns than a tile has
        (2, (6, 300), (3, 3), {"padding": 1, "stride": 2}),
        # a Conformer; a long row, and one of odd length
        (3, (1, 100), (1, 31), {"dtype": FP32, "padding": (0, 15)}),
        (2, (1, 1500), (1, 31), {"dtype": FP32, "padding": (0, 30, 0, 0)}),
        (2, (1301,), (15,), {"dtype": FP32, "padding": 2, "stride": 2}),
        # dilation
        (3, (13, 12), (3, 3), {"padding": (4, 2), "dilation": (3, 2)}),
        (3, (16, 12), (3, 3), {"dtype": FP32, "stride": (2, 1), "dilation": (3, 2), "padding": 4}),
        # X3D
        (3, (5, 8, 8), (3, 3, 3), {"dtype": FP32, "padding": 1}),
        (2, (5, 8, 9), (3, 3, 3), {"padding": 1, "stride": 2}),
        (2, (7, 8, 8), (5, 1, 1), {"padding": (2, 0, 0), "dilation": (2, 1, 1)}),
        (2, (4, 8, 8), (1, 3, 3), {"dtype": FP32, "padding": (0, 1, 1), "stride": (1, 2, 2)}),
        # stride above the kernel; padding beyond the kernel, an image below it
        (3, (9, 11), (2, 3), {"dtype": FP32, "stride": (3, 4), "padding": (1, 2)}),
        (3, (2, 3), (5, 3), {"dtype": FP32, "padding": (6, 5), "stride": (2, 1)}),
        (3, (1, 1), (3, 3), {"padding": 1}),
    ],
)
def test_fixed_shapes_in_contiguous_layout(
    c: int, size: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    for op in ("fprop", "dgrad"):
        problem = depthwise(op, c, size, kernel, memory_format=CONTIGUOUS, **options)
        check_offers(problem, most=2)


@pytest.mark.basic(5)
@pytest.mark.parametrize("layout", [torch.channels_last, CONTIGUOUS])
@pytest.mark.parametrize(
    ("bias", "residual", "activation"),
    [(True, False, ""), (True, True, "silu"), (False, True, "relu"), (True, False, "hardswish")],
)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_epilogues(
    bias: bool, residual: bool, activation: str, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    options = {"bias": bias, "residual": residual, "activation": activation, "dtype": dtype}
    options |= {"stride": 2, "padding": 1, "memory_format": layout}
    problem = depthwise("fprop", 16, (9, 31), (3, 3), **options)
    implementation = that_computes(problem)
    check(implementation, problem, implementation.offers(problem, H200)[0].settings)


def test_several_outputs_a_channel() -> None:
    for size, dtype in (((9, 8), FP16), ((3, 4, 6), FP32)):
        problem = depthwise("fprop", 8, size, (3,) * len(size), multiplier=3, dtype=dtype)
        check_offers(problem)
        assert not DEPTHWISE.offers(
            depthwise("dgrad", 8, size, (3,) * len(size), multiplier=3, dtype=dtype), H200
        )


@pytest.mark.basic(1)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_tensors_that_are_hardly_aligned(op: str) -> None:
    options = {"stride": 2, "alignment": (32, 32, 2)}
    problem = depthwise(op, 16, (6, 6), (3, 3), **options)
    offers = [offer.settings for offer in DEPTHWISE.offers(problem, H200)]
    assert offers
    assert all("CHANNELS=1," in settings for settings in offers)
    check(DEPTHWISE, problem, offers[0])
    problem = depthwise(op, 3, (8, 16), (3, 3), memory_format=CONTIGUOUS, **options)
    recipe = PLANES.recipe(problem, PLANES.offers(problem, H200)[0].settings, H200)
    launch = recipe.launches[0]
    assert {("VECTOR_IN", 1), ("VECTOR_OUT", 1)} <= set(launch.kernel.defines)
    check_offers(problem)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.channels_last, CONTIGUOUS])
def test_random_shapes(layout: torch.memory_format) -> None:
    """Sizes, paddings, dilations and channels vary; each kernel is compiled once."""
    chosen = random.Random(0)
    for _ in range(50):
        op = chosen.choice(("fprop", "dgrad"))
        kernel, stride, dtype = chosen.choice(
            (((3, 3), 2, FP16), ((3, 5), 2, BF16), ((3, 3), 1, FP32))
        )
        problem = depthwise(
            op,
            2 * chosen.randint(4, 24) if layout == torch.channels_last else chosen.randint(2, 9),
            (chosen.randint(7, 20), chosen.choice((8, 16))),
            kernel,
            n=chosen.randint(1, 3),
            dtype=dtype,
            stride=stride,
            padding=(chosen.randint(0, 6), 1, chosen.randint(0, 6), 1),
            dilation=(chosen.choice((1, 2, 3)), 1) if stride == 1 else 1,
            memory_format=layout,
        )
        implementation = that_computes(problem)
        check(implementation, problem, implementation.offers(problem, H200)[0].settings)


@pytest.mark.basic(3)
@pytest.mark.parametrize("layout", [torch.channels_last, CONTIGUOUS])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_where_it_belongs(
    op: str, value: float, layout: torch.memory_format
) -> None:
    problem = depthwise(
        op, 16, (9, 8), (3, 3), dtype=FP16, stride=2, padding=1, memory_format=layout
    )
    implementation = that_computes(problem)
    settings = implementation.offers(problem, H200)[0].settings
    tensors = random_tensors(problem)
    tensors["x" if op == "fprop" else "y"][1, 3, 2, 3] = value
    check_not_finite(implementation, problem, settings, tensors)


@pytest.mark.parametrize("layout", [torch.channels_last, CONTIGUOUS])
@pytest.mark.parametrize(
    ("op", "c", "size", "kernel", "options"),
    [
        ("wgrad", 16, (9, 9), (3, 3), {}),
        ("fprop", 16, (9, 9), (3, 3), {"dtype": torch.float64}),
        ("fprop", 16, (9, 9), (1, 1), {}),
        ("fprop", 16, (19, 19), (9, 9), {"dtype": FP32}),
        ("fprop", 16, (9, 9), (7, 7), {}),
        ("dgrad", 16, (9, 9), (3, 3), {"stride": 2, "dilation": 2}),
        ("dgrad", 16, (9, 9), (3, 3), {"multiplier": 2}),
        # most threads would have no pixel, and there would be more of them than a grid can have
        ("fprop", 16, (9, 9), (3, 3), {"dilation": 19, "padding": 19}),
        ("dgrad", 16, (8, 8), (1, 7), {"dilation": 7**8, "padding": (0, 3 * 7**8)}),
    ],
)
def test_what_is_not_offered(
    op: str,
    c: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    layout: torch.memory_format,
) -> None:
    problem = depthwise(op, c, size, kernel, memory_format=layout, **options)
    for implementation in (DEPTHWISE, PLANES):
        assert not implementation.offers(problem, H200)


@pytest.mark.parametrize(
    ("op", "size", "kernel", "options"),
    [
        # what one thread has does not fit into its registers
        ("dgrad", (64, 64), (3, 3), {"stride": 16}),
        # a loop over the columns between taps is unrolled
        ("fprop", (4000,), (3,), {"dilation": 600, "padding": 600}),
    ],
)
def test_what_would_compile_for_long_is_not_offered(
    op: str, size: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    problem = depthwise(op, 8, size, kernel, memory_format=CONTIGUOUS, **options)
    assert not PLANES.offers(problem, H200)


def test_each_kernel_has_its_layout() -> None:
    for layout, other in ((torch.channels_last, PLANES), (CONTIGUOUS, DEPTHWISE)):
        problem = depthwise("fprop", 16, (9, 9), (3, 3), dtype=FP16, memory_format=layout)
        assert that_computes(problem).offers(problem, H200)
        assert not other.offers(problem, H200)
    grouped = ConvProblem("fprop", (1, 16, 9, 9), (16, 2, 3, 3), groups=8, dtype=FP16)
    assert not PLANES.offers(grouped, H200)
