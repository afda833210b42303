"""Formulas of norms and of upsampling compute what PyTorch's functions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_autotune.compile import formulas

SHAPES = {
    "1-d, one group": ((2, 12, 1700), 1),
    "2-d": ((3, 16, 40, 31), 4),
    "3-d, one image": ((1, 8, 5, 20, 30), 2),
    "a group is a channel": ((2, 6, 50, 40), 6),
}
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def operands(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> list[Tensor]:
    torch.manual_seed(0)
    x = offset + torch.randn(shape) * torch.linspace(0.1, 3.0, shape[1]).view(
        1, -1, *[1] * (len(shape) - 2)
    )
    return [x.to(dtype), *(torch.randn(shape[1]).to(dtype) for _ in range(2))]


@pytest.fixture
def by_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's functions are not there to fall back to."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed by PyTorch")

    monkeypatch.setattr(formulas.F, "group_norm", refused)
    monkeypatch.setattr(formulas.F, "instance_norm", refused)


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SHAPES)
def test_results(
    name: str, dtype: torch.dtype, offset: float, request: pytest.FixtureRequest
) -> None:
    """They are as near to float64's as PyTorch's, also where a mean far exceeds the deviation."""
    shape, groups = SHAPES[name]
    x, weight, bias = operands(shape, dtype, offset)
    given: list[Any] = [(weight, bias), (weight, None), (None, None)]
    wide = [[None if one is None else one.double() for one in pair] for pair in given]
    expected = [F.group_norm(x.double(), groups, *pair, eps=1e-3) for pair in wide]
    pytorchs = [F.group_norm(x, groups, *pair, eps=1e-3) for pair in given]
    expected.append(F.instance_norm(x.double(), weight=wide[0][0], bias=wide[0][1]))
    pytorchs.append(F.instance_norm(x, weight=weight, bias=bias))
    request.getfixturevalue("by_channels")
    found = [formulas.group_norm(x, groups, *pair, eps=1e-3) for pair in given]
    found.append(formulas.instance_norm(x, weight=weight, bias=bias))
    for ours, theirs, wanted in zip(found, pytorchs, expected, strict=True):
        assert ours.dtype == dtype
        allowed = ROUNDING[dtype] + 4 * relative_error(theirs, wanted)
        assert relative_error(ours, wanted) <= allowed


def test_what_is_odd_is_left_to_pytorch() -> None:
    """Its bits, its dtype and its errors."""
    x, weight, bias = operands((2, 8, 40, 40), torch.bfloat16, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = formulas.group_norm(x, 2, weight, bias)
        assert torch.equal(found, F.group_norm(x, 2, weight, bias))
    small = x[..., :4, :4]
    assert torch.equal(formulas.group_norm(small, 2), F.group_norm(small, 2))
    mean, var = torch.zeros(8), torch.ones(8)
    running = [x.float(), mean, var, None, None]
    found = formulas.instance_norm(*running, use_input_stats=False)
    assert torch.equal(found, F.instance_norm(*running, use_input_stats=False))
    for groups in (3, 0):
        with pytest.raises((RuntimeError, ZeroDivisionError)) as pytorchs:
            F.group_norm(x, groups)
        with pytest.raises(type(pytorchs.value)) as ours:
            formulas.group_norm(x, groups)
        assert str(ours.value) == str(pytorchs.value)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        formulas.instance_norm(x[..., :1, :1])


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f.group_norm(x, 2),
        lambda f, x: f.instance_norm(x),
        lambda f, x: f.interpolate(x, scale_factor=1),
        lambda f, x: f.interpolate(x, scale_factor=2.0),
        lambda f, x: f.interpolate(x, 80),
        lambda f, x: f.interpolate(x[..., :1, :1], scale_factor=2),
        lambda f, x: f.interpolate(x[..., :1, :1], scale_factor=(1, 4), mode="nearest-exact"),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory(layout: torch.memory_format, call: Callable[[Any, Tensor], Tensor]) -> None:
    """Strides are those of PyTorch on a GPU, and nothing is a view of an input."""
    x = torch.randn(2, 8, 40, 40).to(memory_format=layout)
    found = call(formulas, x)
    with FakeTensorMode():
        expected = call(F, torch.empty_strided(x.shape, x.stride(), device="cuda"))
    assert found.stride() == expected.stride()
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("norm", [lambda f, x: f.group_norm(x, 2), lambda f, x: f.instance_norm(x)])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 8, 2000), torch.contiguous_format),
        ((2, 2, 2000, 1), torch.channels_last),
        ((1, 8, 40, 40), torch.channels_last),
        ((2, 8, 5, 20, 20), torch.channels_last_3d),
    ],
    ids=str,
)
def test_strides_of_norms(
    shape: tuple[int, ...], layout: torch.memory_format, norm: Callable[[Any, Tensor], Tensor]
) -> None:
    """Those of a group norm differ between versions of PyTorch."""
    x = torch.randn(shape).to(memory_format=layout)
    with FakeTensorMode():
        expected = norm(F, torch.empty_strided(x.shape, x.stride(), device="cuda"))
    strides = zip(shape, norm(formulas, x).stride(), expected.stride(), strict=True)
    assert all(ours == pytorchs or length == 1 for length, ours, pytorchs in strides)


def test_nan_and_infinity_stay_in_their_group() -> None:
    x = operands((2, 8, 40, 40), torch.float32, 0.0)[0]
    x[0, 0, 3, 4], x[1, 7, 0, 0] = float("nan"), float("inf")
    found, expected = (of(x, 4) for of in (formulas.group_norm, F.group_norm))
    assert torch.equal(found.isfinite(), expected.isfinite())


class TestInterpolate:
    @pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
    @pytest.mark.parametrize(
        ("shape", "factors"),
        [((2, 3, 7), 2), ((2, 3, 5, 6), 4.0), ((1, 2, 3, 4, 5), (1.0, 2.0, 8.0))],
    )
    @pytest.mark.parametrize("by_size", [False, True])
    def test_powers_of_two_are_a_view_with_pytorchs_bits(
        self,
        shape: tuple[int, ...],
        factors: Any,
        mode: str,
        by_size: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        x = torch.randn(shape, requires_grad=True)
        expected = F.interpolate(x, scale_factor=factors, mode=mode)
        given = {"size": expected.shape[2:]} if by_size else {"scale_factor": factors}
        monkeypatch.delattr(formulas.F, "interpolate")
        found = formulas.interpolate(x, mode=mode, **given)
        assert torch.equal(found, expected)
        of_found, of_expected = (
            torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, expected)
        )
        torch.testing.assert_close(of_found, of_expected)

    @pytest.mark.parametrize(
        "given",
        [
            {"scale_factor": 3.0},
            {"scale_factor": 0.5},
            {"scale_factor": (2, 1.5)},
            {"size": (8, 9)},
            {"size": (12, 9)},
            {"size": (18, 10)},
            {"size": (6, 5)},
            {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
            {"scale_factor": 2, "mode": "area"},
        ],
    )
    def test_others_are_left_to_pytorch(self, given: dict[str, Any]) -> None:
        x = torch.randn(2, 3, 6, 5)
        assert torch.equal(formulas.interpolate(x, **given), F.interpolate(x, **given))

    @pytest.mark.parametrize(
        "given",
        [
            *({}, {"scale_factor": 2, "size": 12}),
            {"size": (12, 10), "recompute_scale_factor": True},
            {"size": (6, 10, 10)},
            *({"scale_factor": factors} for factors in ((), (2,), (2, 2, 2))),
        ],
    )
    def test_errors(self, given: dict[str, Any]) -> None:
        x = torch.randn(2, 3, 6, 5)
        with pytest.raises(ValueError) as pytorchs:
            F.interpolate(x, **given)
        with pytest.raises(ValueError) as ours:
            formulas.interpolate(x, **given)
        assert str(ours.value) == str(pytorchs.value)


class TestMaxPool:
    @pytest.mark.parametrize(
        "given",
        [
            {"kernel_size": 5, "stride": 1, "padding": 2},
            {"kernel_size": (5, 7), "stride": (2, 3), "padding": [1, 3], "dilation": (1, 2)},
            {"kernel_size": [9], "ceil_mode": True},
            {"kernel_size": (13, 2), "stride": 1, "padding": (6, 1)},
        ],
    )
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_large_windows_are_of_rows_and_columns(
        self, given: dict[str, Any], channels_last: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first of equal numbers gets the gradient; a NaN stays in its windows."""
        torch.manual_seed(0)
        x = torch.randint(-3, 4, (2, 3, 23, 22)).double()
        x[0, 1, 7, 9], x[1, 2, 20, 3] = float("nan"), -float("inf")
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        windows: list[Any] = []
        pool = F.max_pool2d

        def seen(x: Tensor, kernel_size: Any, *others: Any, **options: Any) -> Tensor:
            windows.append(kernel_size)
            result: Tensor = pool(x, kernel_size, *others, **options)
            return result

        expected = F.max_pool2d(x, **given)
        monkeypatch.setattr(formulas.F, "max_pool2d", seen)
        found = formulas.max_pool2d(x, **given)
        assert [1 in window for window in windows] == [True, True]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert found.stride() == expected.stride()
        gradient = torch.randn(expected.shape, dtype=torch.float64)
        of_found, of_expected = (torch.autograd.grad(y, x, gradient)[0] for y in (found, expected))
        # Which NaN of a window gets the gradient is not defined.
        torch.testing.assert_close(of_found[1], of_expected[1])
        torch.testing.assert_close(of_found[0, ::2], of_expected[0, ::2])

    @pytest.mark.parametrize(
        "given",
        [
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": (25, 1)},
            {"kernel_size": 5, "return_indices": True},
        ],
    )
    def test_others_are_left_to_pytorch(self, given: dict[str, Any]) -> None:
        x = torch.randn(2, 3, 30, 26)
        found, expected = (of.max_pool2d(x, **given) for of in (formulas, F))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "given",
        [
            {"kernel_size": 5, "padding": 3},
            {"kernel_size": 40},
            {"kernel_size": 5, "stride": 0},
            {"kernel_size": (5, 5, 5)},
        ],
    )
    def test_errors(self, given: dict[str, Any]) -> None:
        x = torch.randn(2, 3, 20, 20)
        for of in (formulas, F):
            with pytest.raises(RuntimeError):
                of.max_pool2d(x, **given)
