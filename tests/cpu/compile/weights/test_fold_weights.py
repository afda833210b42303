"""The operator ``fold_weights``: its reference, what it says of its results, and its kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import cuda_emulation
from support.conv.references import TOLERANCES, assert_close
from support.models.fold_cases import BATCH_NORM, Folded, case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_autotune.compile.weights import operators
from cudnn_autotune.compile.weights.operators import SCALE, SHIFT, fold_weights, laid_out
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.problem import strides_of
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.kernels import sources

LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
DTYPES = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]
MOST = 40  # weights of a launch
NUMBERS_OF_BLOCK = 4096


class Item(ctypes.Structure):
    """A weight, as the kernel takes it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("folded_weight", ctypes.c_void_p),
        ("vectors", ctypes.c_void_p * 5),
        ("folded_bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kinds", "rows", "columns", "turns")),
        *((name, ctypes.c_int) for name in ("is_turned", "first_block", "rows_per_block")),
    )


class Items(ctypes.Structure):
    _fields_ = (("all", Item * MOST), ("count", ctypes.c_int))


KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def by_kernel(given: Folded) -> list[Tensor]:
    """Runs the kernel on the emulation of CUDA, as csrc/weights/weights_cuda.cpp does."""
    results: list[Tensor] = fold_weights(*given.all)
    for one in results:
        one.fill_(float("nan"))
    biases = iter(results[len(given.weights) :])
    vectors = iter(given.vectors)
    items = []
    for weight, folded, bits, eps in zip(
        given.weights, results, given.given, given.eps, strict=False
    ):
        columns, turns = weight.shape[1], weight[0, 0].numel()
        if not given.channels_last:
            columns, turns = turns, columns
        item = Item(weight.data_ptr(), folded.data_ptr(), eps=eps, rows=len(weight))
        item.columns, item.turns = columns, turns
        for place in range(5):
            if bits >> place & 1:
                vector = next(vectors)
                item.vectors[place] = vector.data_ptr()
                item.kinds |= KINDS[vector.dtype] << 2 * place
        if operators.has_bias(bits):
            item.folded_bias = next(biases).data_ptr()
        is_dense = 1 in (columns, turns)
        item.is_turned = not is_dense and weight.stride() != folded.stride()
        item.rows_per_block = max(1, NUMBERS_OF_BLOCK // (columns * turns))
        items.append(item)
    library = cuda_emulation.compiled(kernel(given))
    for first in range(0, len(items), MOST):
        some = items[first : first + MOST]
        launch = Items(count=len(some))
        blocks = 0
        for i, item in enumerate(some):
            item.first_block = blocks
            launch.all[i] = item
            blocks += -(-item.rows // item.rows_per_block)
        dim3 = ctypes.c_uint * 3
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(launch), ctypes.c_void_p))
        error = library.emulate(1, dim3(blocks, 1, 1), dim3(256, 1, 1), 0, arguments, 0, 1, 0, 0)
        assert not error, error
    return results


def kernel(given: Folded) -> Kernel:
    defines = (
        ("WEIGHT", sources.ELEMENTS[given.weights[0].dtype]),
        ("FOLDED", sources.ELEMENTS[given.dtype]),
        ("THREADS", 256),
    )
    source = sources.source(operators.__package__, "fold.cu")
    return Kernel(source, "fold_weights", defines)


def assert_folded(found: list[Tensor], given: Folded) -> None:
    expected = given.expected()
    assert len(found) == len(expected)
    for result, right in zip(found, expected, strict=True):
        assert result.dtype == given.dtype
        assert_close(result, right, TOLERANCES[given.dtype])
    for result in found[: len(given.weights)]:
        assert result.stride() == strides_of(result.shape, given.channels_last)


@pytest.mark.parametrize(("from_last", "channels_last"), LAYOUTS)
@pytest.mark.parametrize(("weight", "folded"), [*DTYPES, (torch.float64, torch.float64)], ids=str)
def test_the_reference(
    weight: torch.dtype, folded: torch.dtype, from_last: bool, channels_last: bool
) -> None:
    given = case(weight, folded, from_last=from_last, channels_last=channels_last)
    assert_folded(fold_weights(*given.all), given)


@pytest.mark.parametrize("channels_last", [False, True])
def test_fake_results_have_the_shapes_the_strides_and_the_dtype(channels_last: bool) -> None:
    given = case(torch.float32, torch.bfloat16, channels_last=channels_last)
    results = fold_weights(*given.all)
    with FakeTensorMode() as mode:
        weights = [mode.from_tensor(tensor) for tensor in given.weights]
        vectors = [mode.from_tensor(tensor) for tensor in given.vectors]
        fake = fold_weights(weights, vectors, *given.all[2:])
    for one, real in zip(fake, results, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
@pytest.mark.parametrize(("from_last", "channels_last"), LAYOUTS)
@pytest.mark.parametrize(("weight", "folded"), DTYPES, ids=str)
def test_the_kernel(
    weight: torch.dtype, folded: torch.dtype, from_last: bool, channels_last: bool
) -> None:
    vectors = weight if weight == torch.float16 else torch.float32
    given = case(weight, folded, vectors, from_last=from_last, channels_last=channels_last)
    assert_folded(by_kernel(given), given)


@pytest.mark.basic(1)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_the_kernel_compiles(capability: tuple[int, int]) -> None:
    for weight, folded in DTYPES:
        assert cubin(kernel(case(weight, folded)), capability)


def test_a_copy_in_another_layout_is_exact() -> None:
    given = case(torch.float16, torch.float16)
    copies = laid_out(given.weights, True, torch.float16)
    for result, weight in zip(copies, given.weights, strict=True):
        assert torch.equal(result, weight)
        assert result.data_ptr() != weight.data_ptr()
        assert result.stride() == strides_of(weight.shape, True)


def test_nan_and_infinity_pass() -> None:
    weight = torch.tensor([[[float("nan")]], [[float("inf")]], [[1.0]]])
    scale, shift = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([float("inf"), 0.0, 1.0])
    folded, bias = fold_weights(
        [weight], [scale, shift], [SCALE | SHIFT], [0.0], torch.float16, False
    )
    assert folded[0].isnan()
    assert folded[1] == -torch.inf
    assert folded[2] == 0
    assert bias.tolist() == [torch.inf, 0, 1]


def test_a_batch_norm_is_that_of_pytorch() -> None:
    norm = torch.nn.BatchNorm2d(8).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        torch.nn.init.uniform_(tensor, 0.5, 2)  # type: ignore[arg-type]
    conv = torch.nn.Conv2d(4, 8, 3, bias=False)
    x = torch.randn(2, 4, 9, 9)
    with torch.no_grad():
        vectors = [norm.weight, norm.running_var, norm.running_mean, norm.bias]
        folded, bias = fold_weights(
            [conv.weight], vectors, [BATCH_NORM], [norm.eps], torch.float32, True
        )
        torch.testing.assert_close(torch.conv2d(x, folded, bias), norm(conv(x)))
