"""``fuse(model, example_input)``: a model for inference in eager mode, with fused groups."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_cases import FUNCTIONS
from references import TOLERANCES, assert_close
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import ACTIVATIONS
from cudnn_autotune.nn.models import fuse as fuse_module


class Block(nn.Module):
    """A residual block with a convolution in its shortcut, and an activation in place."""

    def __init__(self, activation: Any = F.relu) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4, affine=False)
        self.shortcut = nn.Conv2d(4, 4, 1, bias=False)
        self.activation = activation
        for norm in (self.norm, self.norm2):
            nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        y = self.norm2(self.second(y))
        y += self.shortcut(x)
        return self.activation(y)


@pytest.fixture
def input() -> Tensor:
    return torch.randn(2, 4, 9, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_groups_are_fused_and_batch_norms_folded(
    activation: str, dtype: torch.dtype, input: Tensor
) -> None:
    model = Block(FUNCTIONS[activation]).eval().to(dtype)
    fused = ca.fuse(model, input.to(dtype), groups="always")
    assert [group.text for group in fused.groups] == [
        f"conv + bias + {activation}",
        "conv + bias",
        f"conv + residual + {activation}",
    ]
    assert not fused.unfused
    assert "batch_norm" not in fused.program.code  # type: ignore[operator]
    expected = copy.deepcopy(model).double()(input.to(dtype).double())
    # Two roundings to the dtype follow one another in the longer branch.
    assert_close(fused(input.to(dtype)), expected, 2 * TOLERANCES[dtype])


def test_on_the_cpu_nothing_is_fused_by_itself(input: Tensor) -> None:
    model = Block().eval()
    fused = ca.fuse(model, input)
    assert len(fused.unfused) == 3
    assert {group.reason for group in fused.unfused} == {"it is on the device cpu"}
    torch.testing.assert_close(fused(input), model(input))


class Others(nn.Module):
    """Convolutions that are in no group, and results that are not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(4, 6, 4, padding="same", dilation=2, bias=False)
        self.up = nn.ConvTranspose2d(6, 6, 3, stride=2, output_padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 1)
        self.norm2 = nn.BatchNorm2d(6)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        y = self.norm(self.up(self.same(x).tanh()))
        z = self.twice(y)
        return {"sum": z + scale, "both": (self.norm2(z), z), "nothing": None}


def test_convolutions_that_are_not_fused_are_listed_and_right(input: Tensor) -> None:
    model = Others().eval()
    nn.init.normal_(model.norm.running_mean)  # type: ignore[arg-type]
    fused = ca.fuse(model, input, groups="always")
    assert [(group.text, group.is_fused) for group in fused.groups] == [
        ("conv", False),
        ("conv", False),
        ("conv + bias", True),
    ]
    assert [group.reason for group in fused.unfused][1] == "it is transposed"
    assert "1 of 3 convolutions fused" in repr(fused)
    found, expected = fused(input), model(input)
    assert found["nothing"] is None
    torch.testing.assert_close(found["sum"], expected["sum"])
    torch.testing.assert_close(found["both"], expected["both"])
    assert "batch_norm" in fused.program.code  # type: ignore[operator]
    assert "conv_fprop" in fused.program.code  # type: ignore[operator]
    assert "conv_transpose" in fused.program.code  # type: ignore[operator]


def test_a_batch_norm_whose_convolution_is_used_elsewhere_is_kept(input: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
            nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.conv(x)
            return self.norm(y), y

    model = Model().eval()
    fused = ca.fuse(model, input, groups="always")
    torch.testing.assert_close(fused(input), model(input))
    assert "batch_norm" in fused.program.code  # type: ignore[operator]


def test_shared_layers_and_unbatched_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            nn.init.normal_(self.norm2.running_mean)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            first = self.norm(self.conv(x)).relu()
            return self.norm2(self.conv(first)).relu() + self.conv(first)

    model = Model().eval()
    input = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(ca.fuse(model, input, groups="always")(input), model(input))
    unbatched = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval()
    fused = ca.fuse(unbatched, input[0], groups="always")
    torch.testing.assert_close(fused(input[0]), unbatched(input[0]))


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    convolution = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
    model = nn.Sequential(convolution(4, 6, 3, padding="same"), norm(6), nn.SiLU(inplace=True))
    model.eval()
    input = torch.randn(2, 4, *[7] * dims)
    fused = ca.fuse(model, input, groups="always")
    assert [group.text for group in fused.groups] == ["conv + bias + silu"]
    torch.testing.assert_close(fused(input), model(input))


def test_a_dynamic_batch(input: Tensor) -> None:
    model = Block().eval()
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    fused = ca.fuse(model, input, dynamic_shapes=dynamic, groups="always")
    assert not fused.unfused
    other = torch.randn(5, 4, 9, 8)
    torch.testing.assert_close(fused(other), model(other))


def test_another_size_than_the_examples_is_refused(input: Tensor) -> None:
    fused = ca.fuse(Block().eval(), input)
    with pytest.raises(AssertionError, match="size"):
        fused(torch.randn(5, 4, 9, 8))


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_forms_of_the_example(kind: str, input: Tensor) -> None:
    model = Block().eval()
    example: Any = {"tensor": input, "tuple": (input,), "dict": {"x": input}}[kind]
    fused = ca.fuse(model, example)
    found = fused(x=input) if kind == "dict" else fused(input)
    torch.testing.assert_close(found, model(input))


def test_the_given_model_is_not_changed_and_what_is_not_folded_is_shared(input: Tensor) -> None:
    model = nn.Sequential(Block(), nn.Flatten(), nn.Linear(4 * 9 * 8, 3)).eval()
    state = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    fused = ca.fuse(model, input, groups="always")
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    pointers = {parameter.data_ptr() for parameter in fused.parameters()}
    assert model[2].weight.data_ptr() in pointers
    assert model[0].first.weight.data_ptr() not in pointers, "it was folded, and is not kept"


def test_copies_and_modes(input: Tensor) -> None:
    model = Block().eval()
    fused = ca.fuse(model, input, groups="always")
    assert fused.eval() is fused
    with pytest.raises(ValueError, match="inference only"):
        fused.train()
    copied, shared = copy.deepcopy(fused), copy.copy(fused)
    with torch.no_grad():
        expected = model(input)
        for parameter in fused.parameters():
            parameter.zero_()
    assert len(copied.groups) == len(shared.groups) == 3
    torch.testing.assert_close(copied(input), expected)
    assert not torch.equal(shared(input), expected)


def test_it_is_exported_where_it_cannot_be_pickled(input: Tensor) -> None:
    model = Block().eval()
    fused = ca.fuse(model, input, groups="always")
    for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled\. .* torch\.export\.save"):
            save(fused)
    file = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(fused, (input,)), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert "conv_fused" in str(loaded)
    torch.testing.assert_close(loaded.module()(input), model(input))


def test_a_converted_model_is_taken(input: Tensor) -> None:
    model = ca.convert(Block()).eval()
    fused = ca.fuse(model, input, groups="always")
    assert not fused.unfused
    torch.testing.assert_close(fused(input), model(input))


def test_the_policy_is_that_of_all_convolutions(input: Tensor) -> None:
    fused = ca.fuse(Others().eval(), input, sampling="race", workspace_limit=0, groups="always")
    code: str = fused.program.code  # type: ignore[assignment]
    assert code.count("'race', 0)") == 3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": lambda x: x}, TypeError, "torch.nn.Module"),
        ({"model": Block()}, ValueError, r"model\.eval\(\)"),
        ({"example_input": [1]}, TypeError, "example_input"),
        ({"groups": "perhaps"}, ValueError, "measure, always, never"),
        ({"sampling": "no mode"}, ValueError, "sampling"),
        ({"workspace_limit": -5}, ValueError, "workspace_limit"),
    ],
)
def test_a_wrong_argument_is_named(
    change: dict[str, Any], error: type[Exception], text: str, input: Tensor
) -> None:
    arguments = {"model": Block().eval(), "example_input": input, **change}
    with pytest.raises(error, match=text):
        ca.fuse(**arguments)


def test_one_part_in_training_mode_is_refused(input: Tensor) -> None:
    model = Block().eval()
    model.norm.train()
    with pytest.raises(ValueError, match="eval mode"):
        ca.fuse(model, input)


def test_a_scripted_model_is_refused(input: Tensor) -> None:
    scripted = torch.jit.trace(Block().eval(), input)
    with pytest.raises(ValueError, match=r"torch\.jit"):
        ca.fuse(scripted, input)


def test_a_wrong_result_is_an_error(input: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = fuse_module._folded

    def wrong(*values: Any, epsilon: float) -> tuple[Tensor, Tensor]:
        weight, bias = folded(*values, epsilon=epsilon)
        return weight, bias + 1

    monkeypatch.setattr(fuse_module, "_folded", wrong)
    with pytest.raises(RuntimeError, match="relative error"):
        ca.fuse(Block().eval(), input)
