"""Convolutions write into the concatenations that are made of their outputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import TOLERANCES, assert_close, relative_error
from support.models.made import Made
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_autotune as ca
from cudnn_autotune.compile import programs

OPTIONS = {"fuse": "always", "cpp.weight_prepack": False, "compare": False}
LAST = torch.channels_last


class Dense(nn.Module):
    """A dense block: each convolution reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(16 + 8 * i, 16 if i == 3 else 8, 3, padding=1) for i in range(4)
        )

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for conv in self.convs:
            parts.append(F.leaky_relu(conv(self.joined(parts)), 0.2))
        return parts[-1] + x


class Sloped(Dense):
    """Has PReLU, whose slopes go with the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.ParameterList(torch.randn(conv.out_channels) for conv in self.convs)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for conv, slope in zip(self.convs, self.slopes, strict=True):
            parts.append(F.prelu(conv(self.joined(parts)), slope))
        return parts[-1] + x


def called(model: Any, x: Tensor) -> Tensor:
    """Calls the operator itself, without its last arguments."""
    conv = model.first
    geometry = (conv.weight, conv.bias, None, [1, 1], [1, 1], [1, 1], 1)
    ops = torch.ops.cudnn_autotune
    parts = [ops.conv_fused(x, *geometry, "relu"), ops.conv_fused(x, *geometry)]
    parts.append(ops.conv_fused(x, *geometry, "prelu", slope=model.slope))
    return model.last(torch.cat(parts, 1))


class NewestFirst(Dense):
    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts[::-1], 1)


def twice() -> nn.Module:
    """Two blocks: what the first one ends in is a part of the second one's concatenations."""
    return nn.Sequential(Dense(), Dense())


def skips(model: Any, x: Tensor) -> Tensor:
    """A U-Net: one part is written long before the other one, which no convolution writes."""
    skip = F.relu(model.down(x))
    y = F.relu(model.mid(F.max_pool2d(skip, 2)))
    return torch.tanh(model.last(torch.cat([skip, model.up(y)], 1)))


def branches(model: Any, x: Tensor) -> Tensor:
    """Branches without an epilogue, one of which is read elsewhere too, nested concatenations."""
    a, b = model.a(x), model.b(x)
    inner = torch.cat([a, b], 1)
    outer = torch.cat([F.relu(model.d(inner)), inner], 1)
    return model.e(outer) + torch.cat([model.c(x), a], 1)


def nested(model: Any, x: Tensor) -> Tensor:
    """A concatenation has another one for a part, and the parts of that besides."""
    a, b = F.relu(model.a(x)), F.relu(model.b(x))
    return F.relu(model.c(torch.cat([torch.cat([a, b], 1), a, b], 1)))


def conv(channels: int, kernels: int, edge: int = 3, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, kernels, edge, padding=edge // 2, bias=bias)


class Marked(nn.Conv2d):
    """A convolution that the backend takes, as it takes all on a GPU, also without an epilogue."""

    def forward(self, x: Tensor) -> Tensor:
        marked = torch.ops.cudnn_autotune.mark_input(x, "", -1)
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = torch.ops.aten.conv2d(marked, self.weight, self.bias, *geometry)
        return output


def with_statistics(model: nn.Module) -> nn.Module:
    """Gives batch norms statistics that they do not have when they are made."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


class Normed(nn.Module):
    """A DenseNet: norms read the concatenations, in two blocks with a transition between them."""

    def __init__(
        self,
        growth: int = 8,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.norms, self.convs = nn.ModuleList(), nn.ModuleList()
        for i in (*range(4), *range(4)):
            channels = 16 + growth * i
            self.norms.append(nn.BatchNorm2d(channels))
            grows = Marked(channels, growth, 3, padding=1, bias=bias)
            self.convs.append(grows if i < 3 else Marked(channels, 16, 1, bias=bias))
        with_statistics(self)

    def joined(self, whole: Tensor, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def forward(self, x: Tensor) -> Tensor:
        layers = [*zip(self.norms, self.convs, strict=True)]
        for block in (layers[:4], layers[4:]):
            whole = F.max_pool2d(x, 3, 1, 1)
            parts = [whole]
            for norm, conv in block:
                parts.append(conv(self.activation(norm(whole))))
                whole = self.joined(whole, parts)  # behind the last layer for nobody
            x = F.avg_pool2d(parts[-1], 2)
        return x


class Appending(Normed):
    """Each concatenation has the one before it for a part, behind what is new."""

    def __init__(self) -> None:
        super().__init__(bias=True, activation=F.silu)

    def joined(self, whole: Tensor, parts: list[Tensor]) -> Tensor:
        return torch.cat([parts[-1], whole], 1)


class Mixed(nn.Module):
    """Norms read concatenations of convolutions with an epilogue and without one, of a transposed
    one, and of what something else reads too, in place or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Marked(16, 8, 3, padding=1), Marked(16, 8, 1, bias=False)
        self.c, self.d = nn.ConvTranspose2d(16, 8, 3, padding=1), Marked(24, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (16, 24, 32))
        with_statistics(self)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.tanh(self.a(x)), self.b(x), self.c(x)
        first, second, third = self.norms
        d = self.d(F.relu(second(torch.cat([a, b, c], 1))))
        y = F.elu(first(torch.cat([a, b], 1))).mean(1, keepdim=True) + a
        z = third(torch.cat([a, b, c, d], 1)).amax(1, keepdim=True)
        return y * z + d.flatten(2).cumsum(2).view(d.shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dense": (Dense, 1),
    "sloped": (Sloped, 1),
    "called": (
        lambda: Made(
            called, first=conv(16, 8), last=conv(24, 16, 1), slope=nn.Parameter(torch.randn(8))
        ),
        1,
    ),
    "newest first": (NewestFirst, 1),
    "twice": (twice, 2),
    "skips": (
        lambda: Made(
            skips,
            down=conv(16, 8),
            mid=conv(8, 16),
            up=nn.ConvTranspose2d(16, 8, 2, 2),
            last=conv(16, 16),
        ),
        1,
    ),
    "branches": (
        lambda: Made(
            branches,
            a=conv(16, 8, 1, False),
            b=conv(16, 8, 3, False),
            c=conv(16, 8, 5, False),
            d=conv(16, 8, 1, False),
            e=conv(24, 16),
        ),
        1,
    ),
    "nested": (lambda: Made(nested, a=conv(16, 8), b=conv(16, 8, 1), c=conv(32, 16)), 1),
    "normed": (Normed, 2),
    "appending": (Appending, 2),
    "mixed": (Mixed, 1),
}


def data(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 16, 10, 12)).contiguous(memory_format=LAST)


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, str]:
    """The output of the compiled model, and the generated code."""
    compiled = torch.compile(model, backend="cudnn_autotune", options={**OPTIONS, **options})
    with torch.no_grad():
        output, codes = run_and_get_code(compiled, x)
    return output, codes[0]


def check(model: nn.Module, x: Tensor) -> str:
    """Compares values and strides with those of the model itself; returns the generated code."""
    model = model.eval().to(memory_format=LAST)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    output, code = run(model, x)
    assert_close(output, expected, TOLERANCES[torch.float32])
    assert output.stride() == model(x).stride()
    return code


def reports() -> list[Any]:
    return ca.compilations()[-1].concatenations


@pytest.mark.parametrize("name", MODELS)
def test_values_and_strides(name: str) -> None:
    make, count = MODELS[name]
    code = check(make(), data())
    assert [report.is_in_place for report in reports()] == [True] * count
    assert "conv_fused_into_" in code


def test_a_dense_block_copies_its_input_only() -> None:
    code = check(Dense(), data())
    assert code.count("conv_fused_into_.default(") == 3
    assert "cat" not in code.partition("def call")[2]
    (report,) = reports()
    assert str(report) == ("concatenation of 4 -> 2x40x10x12: written in place, it was asked for")
    assert "1 of 1 concatenations in place" in repr(ca.compilations()[-1])


@pytest.mark.parametrize("make", [Normed, Appending])
def test_nothing_is_concatenated_for_norms(make: Callable[[], nn.Module]) -> None:
    code = check(make(), data())
    assert code.count("conv_fused_into_.default(") == 6
    assert code.count("empty_strided_cpu((2, 40, 10, 12)") == 2, "the tensor, and what is normed"
    assert "cat" not in code.partition("def call")[2]
    assert [report.parts for report in reports()] == [4, 4]


def test_a_part_that_is_viewed_is_copied() -> None:
    code = check(Mixed(), data())
    assert code.count("conv_fused_into_.default(") == 2  # not the transposed one, nor that
    assert "cat" not in code.partition("def call")[2]
    assert reports()[0].parts == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_half_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Normed(growth=16).eval().to(memory_format=LAST, dtype=dtype)
    x = data().to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        limit = 1.5 * relative_error(model(x), expected)  # each layer rounds
    output, code = run(model, x)
    assert relative_error(output, expected) <= limit
    assert code.count("conv_fused_into_.default(") == 6


class Returning(Normed):
    """Returns one of three concatenations, or all, besides what is made of them."""

    def __init__(self, needed: slice) -> None:
        super().__init__()
        self.needed = needed
        self.kept: list[Tensor] = []

    def joined(self, whole: Tensor, parts: list[Tensor]) -> Tensor:
        self.kept.append(torch.cat(parts, 1))
        return self.kept[-1]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        self.kept = []
        y = super().forward(x)
        kept, self.kept = self.kept[:3], []
        return (y, *kept[self.needed])


@pytest.mark.parametrize(
    ("needed", "parts"),
    [
        (slice(0, 1), [4, 4]),  # the others are slices of the largest
        (slice(1, 2), [4, 4]),
        (slice(2, 3), [3, 4]),  # without the largest
        (slice(1, 3), [4]),  # one is left, which saves nothing
    ],
)
def test_what_is_returned_is_not_a_slice(needed: slice, parts: list[int]) -> None:
    model = Returning(needed).eval().to(memory_format=LAST)
    x = data()
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    outputs, code = run(model, x)
    for output, right in zip(outputs, expected, strict=True):
        assert_close(output, right, TOLERANCES[torch.float32])
        assert output.is_contiguous(memory_format=LAST)
    assert [report.parts for report in reports()] == parts
    assert "conv_fused_into_" in code


@pytest.mark.parametrize(
    "views",
    [
        lambda x, y: (r := x + 1, r[:, 8:]),
        lambda x, y: (r := torch.sigmoid(y), r[:, 8:], r.permute(0, 2, 3, 1)),
        lambda x, y: (r := y.mean((2, 3), keepdim=True), r.expand(2, 16, 4, 4)),
        lambda x, y: ((x * 2).mean((2, 3), keepdim=True).expand(2, 16, 4, 4),),
    ],
    ids=["beside the block", "behind it", "expanded", "expanded beside it"],
)
def test_outputs_that_are_views_of_a_value(views: Any) -> None:
    """They share its memory, with PyTorch's strides, as without a concatenation in place."""
    viewed = Made(lambda model, x: [y := model.block(x), *views(x, y)], block=Dense())
    model = viewed.eval().to(memory_format=LAST)
    x = data()
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        given = model(x)
    outputs, code = run(model, x)
    for output, right, own in zip(outputs, expected, given, strict=True):
        assert_close(output, right, TOLERANCES[torch.float32])
        assert output.stride() == own.stride()
    places = [{one.untyped_storage().data_ptr() for one in them[1:]} for them in (given, outputs)]
    assert [len(place) for place in places] == [1, 1]
    assert "conv_fused_into_" in code


@pytest.mark.slow
def test_the_blocks_of_densenet121() -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = with_statistics(models.densenet121(num_classes=10))
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Marked
    code = check(model, data(2, 3, 64, 64))
    assert code.count("conv_fused_into_.default(") == 6 + 12 + 24 + 16
    assert [report.parts for report in reports()] == [7, 13, 25, 17]


def test_later_calls_see_nothing_of_earlier_ones() -> None:
    model = twice().eval().to(memory_format=LAST)
    compiled = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    with torch.no_grad():
        inputs = [data() for _ in range(3)]
        outputs = [compiled(x) for x in inputs]
        for x, output in zip(inputs, outputs, strict=True):
            assert_close(output, copy.deepcopy(model).double()(x.double()), 1e-4)


class Others(nn.Module):
    """Concatenations that are not written in place, for one reason each."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
        self.conv, self.narrow = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.wide, self.odd = nn.Conv2d(32, 16, 1), nn.Conv2d(19, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        joined = torch.cat([y, x], 1)
        half = self.narrow(x)
        results: dict[str, Callable[[], Tensor]] = {
            "it is returned": lambda: joined,
            "no convolution reads it": lambda: F.relu(joined) * 2,
            "it is viewed": lambda: self.conv(joined.flatten(2)[:, 8:24].view(x.shape)),
            "one part twice": lambda: self.wide(torch.cat([y, half, half], 1)),
            "rows": lambda: self.conv(torch.cat([y, x], 2)),
            "not aligned": lambda: self.odd(torch.cat([y, x[:, :3]], 1)),
        }
        return results[self.reason]()


OTHERS = [
    *("it is returned", "no convolution reads it", "it is viewed", "one part twice", "rows"),
    "not aligned",
]


@pytest.mark.parametrize("reason", OTHERS)
def test_others_stay(reason: str) -> None:
    assert "conv_fused_into_" not in check(Others(reason), data())
    assert reports() == []


class Streaming(nn.Module):
    """A causal convolution behind a norm of channels: frames and the last two of an earlier call ->
    its output, and the last two frames for the next call."""

    def __init__(self, dim: int, conv: type[nn.Conv2d | nn.Conv3d] = nn.Conv3d) -> None:
        super().__init__()
        padding: Any = (0, 1) if conv is nn.Conv2d else (0, 1, 1)
        self.dim, self.conv = dim, conv(32 if dim == 1 else 16, 16, 3, padding=padding)

    def forward(self, x: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(F.normalize(x, dim=1) * 4)
        new = x[:, :, -2:].clone()
        return self.conv(torch.cat([earlier, x], self.dim)), new


@pytest.mark.parametrize(
    ("dim", "frames"), [(2, 1), (2, 3), pytest.param(1, 3, marks=pytest.mark.slow)]
)
def test_frames_of_an_earlier_call_are_joined_in_the_layout_of_a_convolution(
    dim: int, frames: int
) -> None:
    """The first call has them contiguous, as Inductor would join them then."""
    model = Streaming(dim).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    expected = copy.deepcopy(model).double()
    x, earlier = (torch.randn(1, 16, t, 5, 4) for t in (frames, 3 if dim == 1 else 2))
    with torch.no_grad():
        run = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
        outputs, codes = run_and_get_code(run, x, earlier)
        for found, wanted in zip(outputs, expected(x.double(), earlier.double()), strict=True):
            assert_close(found, wanted, TOLERANCES[torch.float32])
    joined = torch.cat([earlier, x], dim)
    sizes = rf"\({', '.join(map(str, joined.shape))}\), \({', '.join(map(str, joined.stride()))}\)"
    assert "conv_fused" in codes[0]
    assert not re.search(rf"empty_strided_cpu\({sizes}", codes[0]), "joined contiguously"


def test_a_cache_is_written_before_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a decoder holds what all of its layers' caches are parts of, to its end."""
    monkeypatch.setattr(programs, "favours_channels_last", lambda _: True)
    # The layers convolve images, because torch 2.11 takes volumes on a CPU for contiguous.
    layers = nn.ModuleList(Streaming(2, nn.Conv2d) for _ in range(3))

    def decode(x: Tensor, *earlier: Tensor) -> tuple[Tensor, ...]:
        caches = []
        for layer, cache in zip(layers, earlier, strict=True):
            x, new = layer(x, cache)
            caches.append(new)
        return (x, *caches)

    inputs = [torch.randn(1, 16, frames, 6) for frames in (3, 2, 2, 2)]
    with torch.no_grad():
        expected = decode(*inputs)
        run_ = torch.compile(decode, backend="cudnn_autotune", options=OPTIONS)
        outputs, codes = run_and_get_code(run_, *inputs)
    for found, wanted in zip(outputs, expected, strict=True):
        assert_close(found, wanted.double(), 3 * TOLERANCES[torch.float32])
        assert found.stride() == wanted.stride()
    (returned,) = re.findall(r"return \((.*?),? \)", codes[0])
    _, *caches = returned.split(", ")
    last = codes[0].rindex("conv_fused.default(")
    assert all(0 < codes[0].index(f"{cache} = ") < last for cache in caches)


class Causal(Streaming):
    """A layer that also returns the last frames of what it joins: a copy, or a view beside the
    whole."""

    def __init__(self, returns: str) -> None:
        super().__init__(2)
        self.returns = returns

    def forward(self, x: Tensor, earlier: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([earlier, F.silu(x)], 2)
        output = F.silu(self.conv(joined))
        last = joined[:, :, -2:]
        if self.returns == "view":
            return output, joined, last
        return output, last.clone().mT if self.returns == "transposed" else last.clone()


@pytest.mark.parametrize(
    ("returns", "dynamic"),
    [("copy", False), ("copy", True), ("transposed", False), ("view", False), ("view", True)],
)
def test_frames_for_the_next_call_are_like_pytorchs(returns: str, dynamic: bool) -> None:
    """A copy of the last frames keeps nothing else in memory."""
    model = Causal(returns).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    x, earlier = torch.randn(1, 16, 4, 5, 4), torch.randn(1, 16, 2, 5, 4)
    with torch.no_grad():
        expected = model(x, earlier)
        run = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, dynamic=dynamic)
        outputs = run(x, earlier)
    for found, wanted in zip(outputs, expected, strict=True):
        assert_close(found, wanted, TOLERANCES[torch.float32])
        assert found.stride() == wanted.stride()
        assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    for results in (outputs, expected):
        places = {result.untyped_storage().data_ptr() for result in results}
        assert len(places) == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_contiguous_model_has_pytorchs_strides(name: str) -> None:
    """Inductor lays its convolutions out in channels_last, and these read and write slices."""
    make, count = MODELS[name]
    model, x = make().eval(), data().contiguous()
    output, code = run(model, x)
    assert "conv_fused_into_" in code
    assert len(reports()) == count
    with torch.no_grad():
        assert_close(output, copy.deepcopy(model).double()(x.double()), TOLERANCES[torch.float32])
    assert output.is_contiguous()


def test_contiguous_and_dynamic_graphs_stay() -> None:
    model, x = Dense().eval(), data().contiguous()
    _, code = run(model, x, layout_optimization=False)
    assert "conv_fused_into_" not in code
    compiled = torch.compile(
        model.to(memory_format=LAST), backend="cudnn_autotune", options=OPTIONS, dynamic=True
    )
    with torch.no_grad():
        for width in (12, 14):
            x = data(2, 16, 10, width)
            assert_close(compiled(x), copy.deepcopy(model).double()(x.double()), 1e-4)


def test_without_a_gpu_nothing_is_written_in_place_unasked() -> None:
    _, code = run(Dense().eval().to(memory_format=LAST), data(), fuse="measure")
    assert "conv_fused_into_" not in code
    assert reports() == []


def test_the_operator_writes_its_slice_only() -> None:
    whole = torch.full((2, 40, 6, 7), 5.0).contiguous(memory_format=LAST)
    x, w, b = data(2, 16, 6, 7), torch.randn(8, 16, 3, 3), torch.randn(8)
    arguments = (x, w, b, None, [1, 1], [1, 1], [1, 1], 1, "relu")
    torch.ops.cudnn_autotune.conv_fused_into_(whole[:, 16:24], *arguments)
    assert torch.equal(whole[:, 16:24], F.relu(F.conv2d(x, w, b, padding=1)))
    assert (whole[:, :16] == 5).all()
    assert (whole[:, 24:] == 5).all()
    torch.library.opcheck(
        torch.ops.cudnn_autotune.conv_fused_into_,
        (whole[:, 16:24], *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )
    message = re.escape("output must be of size [2, 8, 6, 7] and Float, got [2, 9, 6, 7]")
    with pytest.raises(ValueError, match=message):
        torch.ops.cudnn_autotune.conv_fused_into_(whole[:, :9], *arguments)
    fakes = FakeTensorMode()
    fake = [fakes.from_tensor(tensor) for tensor in (whole[:, :9], x, w, b)]
    with fakes, pytest.raises(RuntimeError, match="output must be of size"):
        torch.ops.cudnn_autotune.conv_fused_into_(*fake, *arguments[3:])
