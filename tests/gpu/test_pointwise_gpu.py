"""Norms and ReLUs before 1x1 convolutions on a GPU: the operator, and the backend that uses it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pointwise_cases import BATCH_NORM, Pointwise, case
from references import TOLERANCES, relative_error
from torch import nn
from torchvision.models.densenet import DenseNet

import cudnn_autotune as ca
from cudnn_autotune.engines.norms.pointwise import norm_pointwise
from cudnn_autotune.engines.norms.pointwise_plan import MOST_PLANS
from cudnn_autotune.engines.weights.operators import MEAN, SCALE, SHIFT

pytestmark = pytest.mark.gpu
needs_kernel = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is for compute capability 9.x",
)
LAST = torch.channels_last
# N, C, H, W, K, channels of the tensor that the input is a slice of
SIZES = [
    (64, 64, 56, 56, 128, 64),
    (8, 224, 56, 56, 128, 256),
    (16, 480, 28, 28, 128, 512),
    (64, 992, 14, 14, 128, 1024),
    (64, 512, 7, 7, 128, 1024),
    (16, 512, 28, 28, 256, 512),
    (64, 1024, 14, 14, 512, 1024),
    (3, 72, 13, 17, 40, 96),
    (1, 8, 1, 1, 8, 16),
    (2, 2048, 5, 5, 520, 2048),
]


def run(given: Pointwise, plan: int = 0) -> torch.Tensor:
    *operands, _, sampling, limit = given.all
    result: torch.Tensor = norm_pointwise(*operands, plan, sampling, limit)
    return result


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_plans_are_as_near_to_float64_as_pytorch(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = case(*sizes, dtype=dtype, vectors=dtype, adds="bias and residual", device="cuda")
    expected = given.expected()
    before = ca.fallbacks()
    for plan in range(MOST_PLANS):
        output = run(given, plan)
        assert output.is_contiguous(memory_format=LAST)
        assert relative_error(output, expected) <= TOLERANCES[dtype]
        for _ in range(3):
            assert torch.equal(run(given, plan), output), "it gives the same bits each time"
    assert ca.fallbacks() == before, "the kernel is used"


@needs_kernel
@pytest.mark.parametrize("vectors", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [BATCH_NORM, SCALE | SHIFT, MEAN])
@pytest.mark.parametrize("adds", ["", "bias", "residual"])
@pytest.mark.parametrize("activation", ["", "relu", "gelu", "leaky_relu(0.1)"])
def test_epilogues_and_vectors(activation: str, adds: str, bits: int, vectors: torch.dtype) -> None:
    given = case(
        *(4, 96, 20, 20, 64, 128),
        vectors=vectors,
        given=bits,
        adds=adds,
        activation=activation,
        device="cuda",
    )
    before = ca.fallbacks()
    assert relative_error(run(given), given.expected()) <= TOLERANCES[torch.float16]
    assert ca.fallbacks() == before, "the kernel is used"


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nan_and_infinity_go_where_they_go_in_pytorch(dtype: torch.dtype) -> None:
    given = case(2, 96, 20, 20, 64, 128, dtype=dtype, vectors=dtype, device="cuda")
    given.input[0, 3, 1, 1] = math.nan
    given.input[1, 5, 2, 2], given.input[1, 5, 3, 3] = math.inf, -math.inf
    output, expected = run(given), given.expected()
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(output), where(expected))


@needs_kernel
def test_a_captured_call_follows_its_operands() -> None:
    given = case(4, 96, 20, 20, 64, 128, device="cuda")
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(given)
    given.input.mul_(2)
    for vector in given.vectors:
        vector.mul_(1.5)
    graph.replay()
    assert relative_error(output, given.expected()) <= TOLERANCES[torch.float16]


def test_what_the_kernel_does_not_read_is_pytorchs() -> None:
    """A slice that is not aligned, a contiguous input, and other dtypes."""
    cases: list[dict[str, Any]] = [
        {"dtype": torch.float32, "vectors": torch.float32},
        {"whole": 97},
        {"is_contiguous": True},
    ]
    for changes in cases:
        is_contiguous = changes.pop("is_contiguous", False)
        given = case(*(2, 96, 9, 9, 64, changes.pop("whole", 96)), **changes, device="cuda")
        operands = list(given.all)
        if is_contiguous:
            operands[0] = given.input.contiguous()
        output = norm_pointwise(*operands)
        assert output.is_contiguous(memory_format=LAST)
        assert relative_error(output, given.expected()) <= TOLERANCES[torch.float16]


def trained(model: nn.Module) -> nn.Module:
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for of in (norm.weight.data, norm.running_var):
                assert of is not None
                of.uniform_(0.5, 1.5)
            for of in (norm.bias.data, norm.running_mean):
                assert of is not None
                of.normal_(0, 0.5)
    return model.eval().cuda()


@needs_kernel
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("options", [{}, {"freezing": True}, {"fuse": "always"}], ids=str)
def test_a_densenet(options: dict[str, Any], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = trained(DenseNet(32, (3, 4, 3), 64, num_classes=40))
    x = torch.randn(8, 3, 128, 128, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=layout)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        model = model.half().to(memory_format=layout)
        limit = 2 * relative_error(model(x), expected.cpu())
    torch._dynamo.reset()
    options = {"compare": False, **options}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)
    before = ca.fallbacks()
    with torch.no_grad():
        for _ in range(2):
            assert relative_error(compiled(x), expected.cpu()) <= limit
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        again = copy.deepcopy(model).double()(x.double())
    assert relative_error(captured, again.cpu()) <= 2 * limit
    record = ca.compilations()[-1]
    print(record)
    assert len(record.prologues) == 12, "ten layers and two transitions"
    if options.get("fuse") == "always":
        assert all(one.is_fused for one in record.prologues)
        assert [one.is_in_place for one in record.concatenations] == [True] * 3
    else:
        assert all(one.fused_ms and one.several_ms for one in record.prologues)
        assert all(one.in_place_ms and one.several_ms for one in record.concatenations)
    used = {reason for reason in ca.fallbacks() if reason not in before}
    assert not any("norm_pointwise" in reason for reason in used)


@needs_kernel
def test_weights_stay_variable() -> None:
    torch.manual_seed(0)
    model = trained(DenseNet(32, (3, 3), 64, num_classes=40)).half().to(memory_format=LAST)
    x = torch.randn(8, 3, 64, 64, device="cuda", dtype=torch.float16)
    torch._dynamo.reset()
    options = {"compare": False, "fuse": "always"}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)
    with torch.no_grad():
        before = compiled(x)
        for name, tensor in model.state_dict().items():
            if "norm" in name and tensor.is_floating_point():
                tensor.mul_(1.25).add_(0.25)
        after = compiled(x)
        expected = copy.deepcopy(model).double()(x.double())
        limit = 2 * relative_error(model(x), expected.cpu())
    assert relative_error(after, before.double().cpu()) > 10 * limit
    assert relative_error(after, expected.cpu()) <= limit
