"""What PyTorch's convolutions take and refuse, ours take and refuse, with the same error."""

from __future__ import annotations

import enum
import fractions
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cudnn_autotune as ca


class Index:
    """No int, but has the index 1."""

    def __index__(self) -> int:
        return 1


class Int(int):
    pass


class Number(enum.IntEnum):
    one = 1


SCALARS: dict[str, Any] = {
    "1": 1, "0": 0, "-1": -1, "True": True, "False": False, "1.0": 1.0, "1j": 1j, "None": None,
    "str": "1", "name": "same", "valid": "valid", "other name": "full", "bytes": b"1",
    "2**31": 2**31, "2**63": 2**63, "-2**63 - 1": -(2**63) - 1, "int subclass": Int(1),
    "enum": Number.one, "index": Index(), "fraction": fractions.Fraction(1),
    "np.int64": np.int64(1), "np.int32": np.int32(1), "np.uint8": np.uint8(1),
    "np.bool": np.bool_(True), "np.float64": np.float64(1.0), "np.array": np.array(1),
    "np.array of two": np.array([1, 1]), "tensor": torch.tensor(1),
    "tensor of one": torch.tensor([1]), "tensor of two": torch.tensor([1, 1]),
    "float tensor": torch.tensor(1.0), "bool tensor": torch.tensor(True), "range": range(1, 3),
    "set": {1}, "dict": {1: 1}, "size": torch.Size([1, 1]), "slice": slice(1),
}  # fmt: skip
LISTS: dict[str, Any] = {
    **{f"[{name}]": [value] for name, value in SCALARS.items()},
    **{f"({name}, 1)": (value, 1) for name, value in SCALARS.items()},
    **{f"(1, {name})": (1, value) for name, value in SCALARS.items()},
    "[]": [], "()": (), "[1, 1, 1]": [1, 1, 1], "[1, 1, 1, 1]": [1, 1, 1, 1], "[[1, 1]]": [[1, 1]],
}  # fmt: skip
# The default is one that changes nothing, so that 1 is taken for each argument.
CONV = ("stride", "padding", "dilation", "groups")
TRANSPOSED = (*CONV, "output_padding")


pytestmark = pytest.mark.usefixtures("on_cpu")


def outcome(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        result = function(*arguments, **keywords)
    except Exception as error:
        return type(error)
    return tuple(result.shape)


def differences(name: str, arguments: Iterable[str], labels: Iterable[str], device: str) -> Any:
    """The values of arguments, by their labels, with which ours ends otherwise than PyTorch's."""
    dims, values = int(name[-2]), {**SCALARS, **LISTS}
    x = torch.randn(1, 4, *[6] * dims, device=device)
    w = torch.randn(4, 4, *[3] * dims, device=device)
    theirs, ours = getattr(F, name), getattr(ca.functional, name)
    differ = {}
    for argument, label in itertools.product(arguments, labels):
        keywords = {argument: values[label]}
        expected, found = (outcome(f, x, w, None, **keywords) for f in (theirs, ours))
        if found != expected:
            differ[argument, label] = (found, expected)
    return differ


def arguments_of(name: str) -> Sequence[str]:
    return TRANSPOSED if "transpose" in name else CONV


@pytest.mark.filterwarnings("ignore")  # of NumPy and PyTorch, about what some of these are
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, one) for name in ("conv2d", "conv_transpose2d") for one in arguments_of(name)],
)
def test_values_of_an_argument(name: str, argument: str) -> None:
    assert not differences(name, [argument], [*SCALARS, *LISTS], "cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d"])
def test_values_of_an_argument_in_other_dimensions(name: str) -> None:
    labels = ("True", "1.0", "np.int64", "np.bool", "(True, 1)", "[1]", "[1, 1, 1]", "[]")
    assert not differences(name, arguments_of(name), labels, "cpu")


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_what_is_no_tensor(name: str) -> None:
    x, w, b = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(4)
    theirs, ours = getattr(F, name), getattr(ca.functional, name)
    for other in (None, 1, 1.0, True, [1.0], "tensor", x.numpy()):
        for arguments in ((other, w, b), (x, other, b), (x, w, other)):
            assert outcome(ours, *arguments) == outcome(theirs, *arguments), arguments


def test_keywords_that_are_not_there() -> None:
    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    for keywords in ({"out": None}, {"strides": 1}, {"output_padding": 0}):
        assert outcome(ca.functional.conv2d, x, w, **keywords) is TypeError
        assert outcome(F.conv2d, x, w, **keywords) is TypeError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "argument"),
    [("Conv2d", one) for one in CONV]
    # PyTorch asserts that the padding of a transposed layer is a tuple.
    + [("ConvTranspose2d", one) for one in CONV if one != "padding"],
)
def test_attributes_of_a_layer(name: str, argument: str) -> None:
    """They may be changed at any time, and PyTorch checks them in each call."""
    x = torch.randn(1, 4, 6, 6)
    values = {**SCALARS, **LISTS}
    differ = {}
    for label, value in values.items():
        outcomes = []
        for namespace in (torch.nn, ca):
            layer = getattr(namespace, name)(4, 4, 3)
            setattr(layer, argument, value)
            outcomes.append(outcome(layer, x))
        if outcomes[0] != outcomes[1]:
            differ[label] = outcomes
    assert not differ


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_the_fast_path_refuses_them_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ca.set_sampling("heuristic")
    assert not differences(name, arguments_of(name), [*SCALARS, *LISTS], "cuda")
