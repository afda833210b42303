"""The kernels of batch norms on a GPU: their numbers, captures, streams, and what is left to
PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.conv.references import relative_error
from support.norms.cases import Norm, by_operators, by_pytorch, norm
from support.tuning.settling import comes_to, settled
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.norms.plan import FORMS, Form
from cudnn_autotune.norms.reference import packed_mask

ops = torch.ops.cudnn_autotune
FLOORS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""The allowed error where PyTorch's own is less than half of it."""
SHAPES = {
    "layer": (32, 64, 28, 28),
    "parts of a slab": (16, 256, 14, 14),
    "many channels": (5, 2048, 8, 8),
    "a round's rest": (8, 200, 12, 12),
    "one image": (1, 32, 40, 40),
    "no image": (300, 96),
    "1-d": (7, 24, 52),
    "3-d": (2, 16, 6, 10, 12),
}
ODD_SHAPES = {
    "odd channels": (8, 13, 9, 7),
    "three channels": (2, 3, 33, 17),
    "one channel": (4, 1, 5, 9),
    "few values": (7, 40, 1, 1),
    "many odd channels": (4, 1001, 3, 3),
}


@contextmanager
def planned(form: Form | None) -> Iterator[None]:
    """Within the context all new norms have this form, and none is left to PyTorch."""
    before = ca.fallbacks()
    _C.set_norm_form(0 if form is None else 1 + FORMS.index(form))
    try:
        yield
    finally:
        _C.set_norm_form(0)
    assert ca.fallbacks() == before


def check(given: Norm) -> None:
    """Asserts that no result's error, against float64, is twice PyTorch's."""
    found, pytorch = by_operators(given), by_pytorch(given)
    expected = by_pytorch(given.to(torch.float64))
    for name, wanted in vars(expected).items():
        result = getattr(found, name)
        if wanted is None:
            assert result is None, name
            continue
        error = relative_error(result, wanted)
        allowed = 2 * max(relative_error(getattr(pytorch, name), wanted), FLOORS[given.input.dtype])
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        if result.dim() > 1:
            assert result.stride() == given.input.stride(), name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOORS)
@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: Form, dtype: torch.dtype, channels_last: bool) -> None:
    with planned(form):
        for index, shape in enumerate(SHAPES.values()):
            given = norm(
                shape, dtype, channels_last=channels_last, residual=index % 2 == 0, device="cuda"
            )
            check(given)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOORS)
def test_odd_shapes(dtype: torch.dtype, channels_last: bool) -> None:
    with planned(None):
        for shape in ODD_SHAPES.values():
            check(norm(shape, dtype, channels_last=channels_last, residual=True, device="cuda"))


@pytest.mark.parametrize(
    "activation", ["identity", "relu6", "sigmoid", "silu", "gelu", "gelu_tanh"]
)
@pytest.mark.parametrize("form", FORMS)
def test_activations(form: Form, activation: str) -> None:
    with planned(form):
        for residual in (False, True):
            given = norm(
                (8, 64, 14, 14),
                torch.bfloat16,
                activation=activation,
                residual=residual,
                second=True,
                channels_last=True,
                device="cuda",
            )
            check(given)


@pytest.mark.parametrize("form", FORMS)
def test_a_large_mean_does_not_cancel(form: Form) -> None:
    with planned(form):
        given = norm((16, 64, 28, 28), offset=1000.0, channels_last=True, device="cuda")
        check(given)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_the_inputs_dtype_and_none(form: Form) -> None:
    with planned(form):
        shape, dtype = (8, 64, 14, 14), torch.bfloat16
        check(norm(shape, dtype, parameters=dtype, channels_last=True, device="cuda"))
        check(norm(shape, dtype, affine=False, channels_last=True, device="cuda"))


@pytest.mark.parametrize("form", ["half kept", "two passes"])
def test_tensors_that_take_all_multiprocessors(form: Form) -> None:
    """The second one takes several rounds."""
    with planned(form):
        given = norm((64, 64, 56, 56), torch.bfloat16, channels_last=True, device="cuda")
        check(given)
        given = norm((16, 512, 56, 56), torch.bfloat16, residual=True, second=True,
                     channels_last=True, device="cuda")  # fmt: skip
        again = [by_operators(given) for _ in range(2)]
        assert same(*again)
        exact = ops.batch_norm_act_backward(
            given.grad_output.float(), given.grad_output_2.float(), given.input.float(),
            again[0].output.float(), given.weight, given.bias, None, again[0].mean,
            again[0].inv_std, "relu", [True] * 4,
        )  # fmt: skip
        names = ("grad_input", "grad_weight", "grad_bias", "grad_residual")
        for name, wanted in zip(names, exact, strict=True):
            assert relative_error(getattr(again[0], name), wanted) <= FLOORS[torch.bfloat16], name


def same(found: object, expected: object) -> bool:
    """Whether two results have equal bits; both are of one class."""
    pairs = zip(vars(found).values(), vars(expected).values(), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_equal_operands_give_equal_bits(form: Form) -> None:
    with planned(form):
        given = norm((32, 64, 28, 28), torch.bfloat16, residual=True, channels_last=True,
                     device="cuda")  # fmt: skip
        first = by_operators(given)
        assert all(same(by_operators(given), first) for _ in range(20))


@pytest.mark.parametrize("form", FORMS)
def test_a_cuda_graph_replays_it(form: Form) -> None:
    with planned(form):
        make = {"residual": True, "channels_last": True, "device": "cuda"}
        given = norm((32, 64, 28, 28), torch.bfloat16, **make)
        other = norm((32, 64, 28, 28), torch.bfloat16, seed=1, **make)
        expected = by_operators(other)
        by_operators(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = by_operators(given)
        for name, tensor in vars(given).items():
            if isinstance(tensor, Tensor):
                tensor.copy_(getattr(other, name))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert same(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_destroyed_graph_used_serves_the_next(form: Form) -> None:
    """Its counters are as its last replay left them."""
    with planned(form):
        given = norm((16, 256, 14, 14), torch.bfloat16, channels_last=True, device="cuda")
        expected = by_operators(given)
        before = settled(_C.kept_for_graphs)
        for replays in (0, 1, 3, 2, 1):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = [by_operators(given) for _ in range(2)]
            assert _C.kept_for_graphs() > before
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize()
            assert replays == 0 or all(same(one, expected) for one in found)
            graph.reset()
            assert comes_to(_C.kept_for_graphs, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_first_call_inside_a_capture(form: Form) -> None:
    with planned(form):
        given = norm((6, 72, 10, 6 + FORMS.index(form)), torch.float16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = by_operators(given)
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, by_operators(given))


@pytest.mark.parametrize("form", FORMS)
def test_two_streams_at_once(form: Form) -> None:
    """Launches of two streams both want the whole GPU."""
    with planned(form):
        norms = [
            norm((32, 64, 28, 28), torch.bfloat16, seed=seed, channels_last=True, device="cuda")
            for seed in range(2)
        ]
        expected = [by_operators(given) for given in norms]
        streams = [torch.cuda.Stream() for _ in norms]
        torch.cuda.synchronize()
        found: list[list[object]] = [[], []]
        for _ in range(50):
            for results, given, stream in zip(found, norms, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(by_operators(given))
        torch.cuda.synchronize()
        for results, wanted in zip(found, expected, strict=True):
            assert all(same(result, wanted) for result in results)


def test_autograd_and_a_compiled_step() -> None:
    given = norm((16, 64, 14, 14), torch.bfloat16, residual=True, channels_last=True, device="cuda")
    expected = by_operators(given)

    def step(input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        output = ops.batch_norm_act(input, weight, bias, residual, "relu", given.operands[-1])[0]
        return output * 1.0

    torch._dynamo.reset()
    for run in (step, torch.compile(step, fullgraph=True)):
        leaves = [
            tensor.detach().clone().requires_grad_()
            for tensor in given.operands[:4]
            if tensor is not None
        ]
        run(*leaves).backward(given.grad_output)
        grads = [leaf.grad for leaf in leaves]
        wanted = (expected.grad_input, expected.grad_weight, expected.grad_bias)
        for found, gradient in zip(grads, (*wanted, expected.grad_residual), strict=True):
            assert torch.equal(found, gradient)


def test_parts_of_the_gradients() -> None:
    given = norm((16, 64, 14, 14), torch.bfloat16, residual=True, channels_last=True, device="cuda")
    whole = by_operators(given)
    output, mean, inv_std, _, mask = ops.batch_norm_act(*given.operands)
    assert mask.numel() * 8 == output.numel()
    forms: tuple[Form | None, ...] = (None, "two passes")
    for form, of_output in itertools.product(forms, (mask, output)):
        with planned(form):
            for wanted_ones in ([True, False, False, False], [False, True, True, False],
                                [False, True, False, True], [True, True, True, False]):  # fmt: skip
                found = ops.batch_norm_act_backward(
                    given.grad_output, None, given.input, of_output, given.weight, given.bias, None,
                    mean, inv_std, "relu", wanted_ones,
                )  # fmt: skip
                grads = (whole.grad_input, whole.grad_weight, whole.grad_bias, whole.grad_residual)
                for asked, gradient, wanted in zip(wanted_ones, found, grads, strict=True):
                    assert (gradient is not None) == asked
                    if asked:
                        assert relative_error(gradient, wanted) < 1e-2


@pytest.mark.parametrize("activation", ["relu", "relu6"])
@pytest.mark.parametrize("dtype", FLOORS)
@pytest.mark.parametrize("form", FORMS)
def test_masks(form: Form, dtype: torch.dtype, activation: str) -> None:
    """The backward takes them for the output, whatever layout and address its input has."""
    with planned(form):
        for channels, size in ((16, 40), (64, 28), (200, 12), (2048, 8)):
            shape = (8, channels, size, size)
            given = norm(shape, dtype, activation=activation, residual=True, second=True,
                         channels_last=True, device="cuda")  # fmt: skip
            output, mean, inv_std, _, mask = ops.batch_norm_act(*given.operands)
            assert mask.nbytes * 16 == output.nbytes
            assert torch.equal(mask, packed_mask(output, activation))
            room = torch.empty(given.input.numel() + 1, dtype=dtype, device="cuda")
            shifted = room[1:].as_strided(shape, given.input.stride(), 1)
            again = ops.batch_norm_act(shifted.copy_(given.input), *given.operands[1:])
            assert torch.equal(again[4], mask)
            expected = None
            for input, of_output in (
                (given.input, output),
                (given.input, mask),
                (given.input.contiguous(), mask),
                (shifted, mask),
            ):
                found = ops.batch_norm_act_backward(
                    given.grad_output, given.grad_output_2, input, of_output, given.weight,
                    given.bias, None, mean, inv_std, activation, [True] * 4,
                )  # fmt: skip
                expected = expected or found
                assert found[0].stride() == found[3].stride() == input.stride()
                for gradient, wanted in zip(found, expected, strict=True):
                    assert relative_error(gradient, wanted) <= FLOORS[dtype]


WAITING = r"""
extern "C" __global__ void wait_for(volatile int* flag, int* gave_up) {
  __shared__ int room[11 * 1024];  // so that no block of a norm fits beside it
  room[threadIdx.x] = 1;
  __syncthreads();
  const long long begun = clock64();
  while (*flag == 0) {
    if (clock64() - begun > 4000000000LL) {
      *gave_up = room[0];
      break;
    }
  }
}
"""


@pytest.mark.alone
@pytest.mark.parametrize("held", [1, 16, 100])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_beside_a_kernel_that_waits_for_what_follows(form: Form, residual: bool, held: int) -> None:
    """A kernel of another stream holds multiprocessors until the norm and its backward have ended,
    as a send waits for a peer that waits for this rank."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        pytest.skip("this torch does not compile kernels")
    wait_for = compile_kernel(WAITING, "wait_for")
    side = torch.cuda.Stream()
    given = norm((64, 64, 56, 56), torch.bfloat16, residual=residual, channels_last=True,
                 device="cuda")  # fmt: skip
    with planned(form):
        expected = [by_operators(given) for _ in range(3)][-1]
        flag, gave_up = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        one = torch.ones_like(flag)
        flag.copy_(one)
        flag.zero_()
        torch.cuda._sleep(1)  # a kernel is not loaded beside one that waits
        torch.cuda.synchronize()
        grid, block = (held, 1, 1), (32, 1, 1)
        wait_for(grid=grid, block=block, args=[flag, gave_up], stream=side)
        torch.cuda._sleep(2_000_000)
        found = by_operators(given)
        flag.copy_(one)
        torch.cuda.synchronize()
        assert gave_up.item() == 0, "the norm waited for the other kernel"
        assert same(found, expected)
        assert same(by_operators(given), expected), "what is left behind serves the next launch"


@pytest.mark.parametrize("form", FORMS)
def test_running_statistics_beside_a_graph(form: Form) -> None:
    """Eager launches and replays of the same plan move running statistics as PyTorch does."""
    x = torch.randn(32, 64, 28, 28, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    pytorchs = torch.nn.BatchNorm2d(64, device="cuda")
    ours = ca.convert(copy.deepcopy(pytorchs), norms=True)
    with planned(form), _C.NormsByKernels():
        versions = [buffer._version for buffer in ours.buffers()]
        ours(x)
        moved = [buffer._version - v for buffer, v in zip(ours.buffers(), versions, strict=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours(x)
        graph.replay()
        ours(x)
        graph.replay()
    before = [buffer._version for buffer in pytorchs.buffers()]
    pytorchs(x)
    assert moved == [b._version - v for b, v in zip(pytorchs.buffers(), before, strict=True)]
    for _ in range(3):
        pytorchs(x)
    for found, wanted in zip(ours.buffers(), pytorchs.buffers(), strict=True):
        assert relative_error(found, wanted) < 1e-5


def test_a_captured_plan_outlives_those_of_many_sizes() -> None:
    """More sizes than plans are kept for."""
    given = norm((16, 64, 14, 14), torch.bfloat16, channels_last=True, device="cuda")
    expected = by_operators(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_operators(given)
    x = torch.randn(4200, 64, device="cuda")
    for rows in range(2, 4200):
        ops.batch_norm_act(x[:rows], None, None, None, "identity", 1e-5)
    for tensor in vars(found).values():
        if tensor is not None:
            tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same(found, expected)
    assert same(by_operators(given), expected)


@pytest.mark.parametrize("name", ["input", "residual", "grad_output", "grad_output_2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_tensor_at_an_odd_address(name: str, dtype: torch.dtype) -> None:
    """At a multiple of the elements' size. PyTorch's norm of float16 ends the process there."""
    given = norm((8, 32, 12, 12), dtype, residual=True, second=True, channels_last=True,
                 device="cuda")  # fmt: skip
    expected = by_pytorch(given.to(torch.float64))
    values = getattr(given, name)
    for place in (1, 3, 7):
        room = torch.empty(values.numel() + 8, dtype=dtype, device="cuda")
        odd = room.as_strided(values.shape, values.stride(), place).copy_(values)
        with planned("kept"):
            found = by_operators(replace(given, **{name: odd}))
        for of, wanted in vars(expected).items():
            assert relative_error(getattr(found, of), wanted) <= 3 * FLOORS[dtype], of


@pytest.mark.parametrize("channels_last", [False, True])
def test_hardly_aligned_and_strided_operands(channels_last: bool) -> None:
    given = norm((8, 32, 12, 12), torch.bfloat16, channels_last=channels_last, device="cuda")
    expected = by_operators(given)
    room = torch.empty(given.input.numel() + 1, dtype=torch.bfloat16, device="cuda")
    shifted = room[1:].as_strided(given.input.shape, given.input.stride(), 1).copy_(given.input)
    wide = torch.empty(8, 32, 12, 16, dtype=torch.bfloat16, device="cuda")[..., :12]
    for input in (shifted, wide.copy_(given.input)):
        found = by_operators(replace(given, input=input))
        assert relative_error(found.output, expected.output) < 1e-2
        assert relative_error(found.grad_input, expected.grad_input) < 1e-2
    gradient = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, device="cuda").expand_as(given.input)
    found = by_operators(replace(given, grad_output=gradient))
    expected = by_operators(replace(given, grad_output=gradient.contiguous()))
    assert relative_error(found.grad_weight, expected.grad_weight) < 1e-2
    assert found.grad_input.stride() == given.input.stride()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_stay_in_their_channel(form: Form, value: float) -> None:
    with planned(form):
        given = norm((4, 16, 10, 10), torch.float16, activation="identity", channels_last=True,
                     device="cuda")  # fmt: skip
        given.input[1, 3, 2, 1] = value
        found, expected = by_operators(given), by_pytorch(given)
        assert torch.equal(found.output.isfinite(), expected.output.isfinite())
        assert torch.equal(found.grad_input.isfinite(), expected.grad_input.isfinite())


def test_what_the_kernels_do_not_take_is_pytorchs() -> None:
    double = norm((4, 6, 5, 3), torch.float64, residual=True, device="cuda")
    found, expected = by_operators(double), by_pytorch(double)
    assert relative_error(found.output, expected.output) < 1e-12
    assert relative_error(found.grad_input, expected.grad_input) < 1e-12
    empty = torch.empty(0, 3, 4, 4, device="cuda")
    assert ops.batch_norm_act(empty, None, None, None, "relu", 1e-5)[0].shape == empty.shape
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ops.batch_norm_act(torch.ones(1, 3, 1, device="cuda"), None, None, None, "relu", 1e-5)
    with pytest.raises(ValueError, match="weight: expected shape"):
        ops.batch_norm_act(
            torch.ones(2, 3, 4, device="cuda"), torch.ones(2, device="cuda"), None, None, "relu", 0
        )
    with pytest.raises(ValueError, match="activation: 'elu' is not served"):
        ops.batch_norm_act(torch.ones(2, 3, 4, device="cuda"), None, None, None, "elu", 0.0)
