"""The operator ``fold_weights``: its reference, what it says of its results, and its kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import cuda_emulation
from support.checkout import ROOT
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
BACK = (torch.bfloat16, torch.float32)  # gradients of weights that are copied
THREADS = operators._THREADS
# What csrc/weights/weights_cuda.cpp launches, compiled with the kernel.
TABLES = f"""
#include "{ROOT}/csrc/weights/fold_table.h"

static_assert(sizeof(cudnn_autotune::FoldTable) == sizeof(Table));
static_assert(cudnn_autotune::kFoldThreads == THREADS);

extern "C" int launch_size() {{ return sizeof(cudnn_autotune::FoldLaunch); }}
extern "C" int add_to(cudnn_autotune::FoldLaunch& launch, cudnn_autotune::FoldItem& item,
                       const cudnn_autotune::Folded& what, bool is_folded) {{
  if (item.order == cudnn_autotune::FoldOrder::kept) keep_order(item, is_folded);
  return launch.add(item, is_folded ? &what : nullptr);
}}
extern "C" int finish(cudnn_autotune::FoldLaunch& launch) {{
  launch.finish();
  return launch.blocks;
}}
extern "C" int shared_bytes() {{ return cudnn_autotune::kFoldSharedBytes; }}
"""


class Item(ctypes.Structure):
    """A weight, as the kernel takes it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("folded_weight", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "channels", "window")),
        *((name, ctypes.c_int) for name in ("channel_parts", "window_parts", "first_block")),
        *((name, ctypes.c_ushort) for name in ("tile_rows", "tile_channels", "tile_window")),
        ("order", ctypes.c_ubyte),
        ("folded", ctypes.c_ubyte),
    )


class What(ctypes.Structure):
    """What is folded into a weight."""

    _fields_ = (
        ("vectors", ctypes.c_void_p * 5),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("kinds", ctypes.c_int),
    )


KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def by_kernel(given: Folded, *, is_reversed: bool = False) -> list[Tensor]:
    """Runs the kernel on the emulation of CUDA, as csrc/weights/weights_cuda.cpp does.

    Args:
        is_reversed: whether blocks and threads run from the last one to the first.
    """
    results: list[Tensor] = fold_weights(*given.all)
    for one in results:
        one.fill_(float("nan"))
    biases = iter(results[len(given.weights) :])
    vectors = iter(given.vectors)
    library = cuda_emulation.compiled(kernel(given, TABLES))
    launches: list[ctypes.Array[ctypes.c_char]] = []
    for weight, folded, bits, eps in zip(
        given.weights, results, given.given, given.eps, strict=False
    ):
        rows, channels, window = weight.shape[0], weight.shape[1], weight[0, 0].numel()
        item = Item(weight.data_ptr(), folded.data_ptr(), rows, channels, window)
        if 1 not in (channels, window) and weight.stride() != folded.stride():
            item.order = 1 if given.channels_last else 2
        what = What(eps=eps)
        for place in range(5):
            if bits >> place & 1:
                vector = next(vectors)
                what.vectors[place] = vector.data_ptr()
                what.kinds |= KINDS[vector.dtype] << 2 * place
        if operators.has_bias(bits):
            what.bias = next(biases).data_ptr()
        operands = (ctypes.byref(item), ctypes.byref(what), bits != 0)
        if not launches or not library.add_to(launches[-1], *operands):
            launches.append(ctypes.create_string_buffer(library.launch_size()))
            assert library.add_to(launches[-1], *operands)
    dim3 = ctypes.c_uint * 3
    for launch in launches:
        # The table is the launch's first member.
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(launch, ctypes.c_void_p))
        blocks = library.finish(launch)
        grid, block = dim3(blocks, 1, 1), dim3(THREADS, 1, 1)
        shared = library.shared_bytes()
        error = library.emulate(1, grid, block, shared, arguments, int(is_reversed), 1, 0, 0)
        assert not error, error
    return results


def kernel(given: Folded, more: str = "") -> Kernel:
    defines = (
        ("WEIGHT", sources.ELEMENTS[given.weights[0].dtype]),
        ("FOLDED", sources.ELEMENTS[given.dtype]),
        ("THREADS", THREADS),
    )
    source = sources.source(operators.__package__, "fold.cu") + more
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
    found = by_kernel(given)
    assert_folded(found, given)
    for place, right in given.copies():
        assert torch.equal(found[place], right)


@pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize(("weight", "folded"), [*DTYPES, BACK], ids=str)
def test_the_kernel_reads_weights_at_any_address(
    weight: torch.dtype, folded: torch.dtype, from_last: bool, offset: int
) -> None:
    given = case(weight, folded, from_last=from_last, channels_last=not from_last, offset=offset)
    found = by_kernel(given, is_reversed=True)
    assert_folded(found, given)
    for place, right in given.copies():
        assert torch.equal(found[place], right)


@pytest.mark.basic(1)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_the_kernel_compiles(capability: tuple[int, int]) -> None:
    for weight, folded in (*DTYPES, BACK):
        assert cubin(kernel(case(weight, folded)), capability)


def test_a_copy_in_another_layout_is_exact() -> None:
    given = case(torch.float16, torch.float16)
    copies = laid_out(given.weights, True, torch.float16)
    for result, weight in zip(copies, given.weights, strict=True):
        assert torch.equal(result, weight)
        assert result.data_ptr() != weight.data_ptr()
        assert result.stride() == strides_of(weight.shape, True)


@pytest.mark.parametrize("most", [1, 100, 2**24])
def test_gradients_of_copies_are_those_of_weights(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their strides and dtype, however many an operator writes."""
    monkeypatch.setattr(operators, "_GRADIENT_BYTES", most)
    given = [torch.randn(4, 3, k, 2, requires_grad=True) for k in (1, 2, 3, 1, 2)]
    given[1] = given[1].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    copies = laid_out(given, True, torch.bfloat16)
    used = [copies[i] for i in (0, 1, 2, 4)]
    calls = [torch.randn_like(copy) for copy in used]
    found = torch.autograd.grad(used, given, calls, allow_unused=True)
    assert found[3] is None
    for i, call in zip((0, 1, 2, 4), calls, strict=True):
        gradient = found[i]
        assert gradient is not None
        assert (gradient.dtype, gradient.stride()) == (torch.float32, given[i].stride())
        assert torch.equal(gradient, call.float())


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
