"""Programs take turns on the same inputs, and a wrong one is named."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.models.deep_network import IMAGES, deep_network, distance, with_folded_norms
from support.norms.models import Residual
from torch import Tensor, nn

from cudnn_autotune.compile.comparison import Comparison, compare
from cudnn_autotune.timers.programs import paired
from cudnn_autotune.tuning.outputs import difference


class Flawed(torch.autograd.Function):
    """Adds a bias, with three times the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * gradient, gradient.sum((0, 2, 3), keepdim=True)


UNCHANGED: Any = (lambda inputs: [torch.ones(2)], ())
"""A reference whose outputs do not depend on inputs, and its inputs."""


def test_the_faster_program_is_found() -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x + 1

    found = compare({"slow": slow, "fast": lambda x: x + 1}, [torch.ones(3)])
    assert found.fastest == "fast"
    assert found.times_ms["slow"] > 2
    assert not found.wrong


def test_a_wrong_program_is_named_and_not_timed() -> None:
    programs = {"reference": lambda x: (x, 1), "wrong": lambda x: (x * 1.1, 1)}
    found = compare(programs, [torch.ones(3)])
    assert list(found.times_ms) == ["reference"]
    assert "output 0 has a relative error of 0.1" in found.wrong["wrong"]


def test_a_program_that_fails_is_named_and_not_timed() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nat all")

    found = compare({"reference": torch.exp, "other": torch.exp, "broken": fails}, [torch.ones(3)])
    assert list(found.times_ms) == ["reference", "other"]
    assert found.wrong == {"broken": "it fails: RuntimeError: no such kernel"}
    with pytest.raises(RuntimeError, match="no such kernel"):
        compare({"reference": fails, "other": torch.exp}, [torch.ones(3)])


def test_times_are_compared_round_by_round() -> None:
    """The clock falls by half; the second program is 2 % faster in each round but one."""
    drift = [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0]
    samples = {"first": drift, "second": [0.98 * ms for ms in drift[:6]] + [3.0]}
    samples["third"] = [*reversed(drift)]
    assert paired(samples) == {"first": 1.4, "second": pytest.approx(1.4 * 0.98), "third": 1.4}


def test_random_programs_draw_the_same_numbers() -> None:
    state = torch.get_rng_state()
    programs = {"one": lambda x: x + torch.rand(3), "other": lambda x: torch.rand(3) + x}
    assert not compare(programs, [torch.ones(3)]).wrong
    assert torch.equal(torch.get_rng_state(), state)


def test_a_program_that_draws_other_random_numbers_is_named() -> None:
    """Its outputs cannot be compared; those of one that draws none are wrong."""
    programs = {
        "reference": lambda x: x + torch.rand(3),
        "later": lambda x: (torch.rand(3), x + torch.rand(3))[1],
    }
    (text,) = compare(programs, [torch.ones(3)]).wrong.values()
    assert text.startswith("it may draw random numbers in another order: output 0 has a relative")
    programs = {"reference": lambda x: x + 1, "wrong": lambda x: x + torch.rand(3)}
    (text,) = compare(programs, [torch.ones(3)]).wrong.values()
    assert text.startswith("output 0 has a relative")


@pytest.mark.parametrize(
    ("times", "gpu_times", "in_calls", "in_captures"),
    [
        # EfficientNetV2-B0 on an H100: its calls wait for the host.
        ((6.9, 6.54, 6.24), (1.9, 1.55, 1.83), "frozen", "fused"),
        ((2.0, 1.5, 1.9), (2.0, 1.5, 1.9), "fused", "fused"),
        ((2.0, 1.5, 1.9), (1.0, 1.2, 1.1), "fused", "plain"),
        ((2.0, 1.5, 1.9), (1.2, 1.0, 0.995), "fused", "fused"),  # not worth its memory
        ((2.0, 1.5, 1.9), (), "fused", "fused"),  # not on a GPU
    ],
)
def test_captures_get_the_program_with_the_least_gpu_time(
    times: Sequence[float], gpu_times: Sequence[float], in_calls: str, in_captures: str
) -> None:
    names = ("plain", "fused", "frozen")
    found = Comparison(dict(zip(names, times)), dict(zip(names, gpu_times)), {})  # noqa: B905
    assert (found.fastest, found.fastest_in_captures) == (in_calls, in_captures)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ([torch.ones(2)], None),
        ([torch.ones(2) + 1e-4], None),
        ([torch.ones(2) + 0.1], "relative error"),
        ([torch.tensor([1.0, float("nan")])], "not finite"),
        ([torch.ones(2, dtype=torch.float16)], "torch.float16"),
        ([torch.ones(3)], r"\(3,\)"),
        ([], "0 outputs"),
    ],
)
def test_differences_of_outputs(other: list[Tensor], text: str | None) -> None:
    found = difference([torch.ones(2)], other, *UNCHANGED)
    if text is None:
        assert found is None
    else:
        assert found is not None
        assert text.replace("\\", "") in found


def test_infinities_in_the_same_places_are_no_difference() -> None:
    tensor = torch.tensor([1.0, float("inf")])
    assert difference([tensor], [tensor.clone()], *UNCHANGED) is None


def test_integers_are_not_compared_by_value() -> None:
    """The index of the largest of values that are nearly equal may be another one."""
    assert difference([torch.tensor([1, 2])], [torch.tensor([2, 1])], *UNCHANGED) is None


@pytest.fixture(scope="module")
def deep() -> nn.Sequential:
    """A deep network in bfloat16, which amplifies rounding to more than the tolerance."""
    return deep_network(10).bfloat16()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return IMAGES.bfloat16()


def with_flaw(model: nn.Sequential, flaw: str, at: int) -> nn.Sequential:
    """A copy of the model with the flaw in one block."""
    wrong = copy.deepcopy(model)
    wrong[at].flaw = flaw
    return wrong


def test_what_a_deep_network_makes_of_rounding_is_allowed(
    deep: nn.Sequential, images: Tensor
) -> None:
    """The same network with folded batch norms rounds otherwise."""
    fused = with_folded_norms(deep)
    with torch.no_grad():
        assert distance(deep(images), fused(images)) > 0.1
    assert not compare({"reference": deep, "fused": fused}, [images]).wrong


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    ("flaw", "at"), [("no residual", 0), ("no residual", 9), ("another activation", 0)]
)
def test_a_flaw_in_one_block_of_a_deep_network_is_found(
    flaw: str, at: int, deep: nn.Sequential, images: Tensor
) -> None:
    wrong = with_flaw(deep, flaw, at)
    found = compare({"reference": deep, "wrong": wrong}, [images])
    assert re.fullmatch(
        r"output 0 has a relative error of \S+, allowed is 0\.\d+ \(noise 0\.\d+\)",
        found.wrong["wrong"],
    )


def functional(model: nn.Module) -> tuple[Callable[..., Any], list[Tensor]]:
    """A model as a function of its input and state, and the state."""
    names, values = zip(*model.state_dict(keep_vars=True).items(), strict=True)

    def call(x: Tensor, *state: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(names, state, strict=True)), x)

    return call, list(values)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_gradients_of_a_deep_network_are_compared(is_wrong: bool, images: Tensor) -> None:
    """Rounding alone takes those of right programs further apart than the tolerance."""
    whole, parameters = functional(deep_network(3).bfloat16())
    bias = nn.Parameter(torch.randn(1, 16, 1, 1).bfloat16())

    def reference(x: Tensor, bias: Tensor, *parameters: Tensor) -> Any:
        return whole(x + bias, *parameters)

    def in_float32(x: Tensor, bias: Tensor, *parameters: Tensor) -> Any:
        y = Flawed.apply(x, bias) if is_wrong else x + bias
        return whole(y.float(), *[one.float() for one in parameters]).bfloat16()

    inputs = [images.detach().requires_grad_(), bias, *parameters]
    programs = {"reference": reference, "in float32": in_float32}
    positions = range(1, len(inputs))
    found = compare(programs, inputs, positions, for_training=True)
    assert (found.wrong.get("in float32") is not None) == is_wrong
    if is_wrong:
        text = r"gradient 0 has a relative error of \S+, allowed is \S+ \(noise 0\.\d+\)"
        assert re.fullmatch(text, found.wrong["in float32"])
    assert all(one.grad is None for one in inputs)


@pytest.mark.parametrize("given", ["images", "token ids"])
def test_gradients_are_as_precise_as_what_computes_them(given: str) -> None:
    """Weights in float32 are rounded under autocast, and tell the noise where only token ids are
    given."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = Residual()
        x = torch.randn(4, 8, 6, 5)
        if given == "token ids":
            layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()] * 6
            model = nn.Sequential(nn.Embedding(100, 16), *map(copy.deepcopy, layers))
            x = torch.randint(100, (64,))
    call, weights = functional(model)

    def in_float32(x: Tensor, *state: Tensor) -> Any:
        return call(x, *map(torch.clone, state)).float().square().mean()

    def rounded(x: Tensor, *state: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return in_float32(x, *state)

    def wrong(x: Tensor, *state: Tensor) -> Any:
        # Gradients have the other sign.
        return in_float32(x, *(2 * w.detach() - w if w.requires_grad else w for w in state))

    programs = {"reference": rounded, "in float32": in_float32, "wrong": wrong}
    inputs, positions = [x, *weights], range(1, 1 + len(weights))
    found = compare(programs, inputs, positions, for_training=True, dtypes={torch.bfloat16})
    assert [*found.wrong] == ["wrong"]
    assert re.match(r"gradient \d has a relative error of (1\.9|2)", found.wrong["wrong"])


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_a_loss_in_float16_is_scaled_unless_gradients_overflow(scale: float) -> None:
    """The least number of float16 is 6e-8."""

    def mean(x: Tensor) -> Tensor:
        return x.half().square().float().mean() * scale

    def in_float32(x: Tensor) -> Tensor:
        return x.square().mean() * scale

    x = torch.randn(20, 20, requires_grad=True)
    programs = {"reference": mean, "in float32": in_float32}
    assert not compare(programs, [x], for_training=True, dtypes={torch.float16}).wrong
    programs["wrong"] = lambda x: Flawed.apply(in_float32(x)[None, None, None, None], 0 * x[:1, :1])
    found = compare(programs, [x], for_training=True, dtypes={torch.float16})
    assert [*found.wrong] == ["wrong"]


def test_a_gradient_that_is_rounding_alone_is_not_compared() -> None:
    """A norm subtracts the bias."""

    def normed(x: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.instance_norm(x + bias)

    x, bias = torch.randn(2, 3, 9, 9), torch.randn(1, 3, 1, 1, requires_grad=True)
    programs = {"reference": normed, "zero": lambda x, bias: normed(x, bias.detach()) + 0 * bias}
    assert not compare(programs, [x, bias], [1], for_training=True).wrong


@pytest.mark.parametrize("count", [10, 80])
def test_gradients_of_few_numbers_are_compared_as_one(count: int) -> None:
    """The noise of a single number may be small by chance, and its error large."""
    generator = torch.Generator().manual_seed(0)

    def rounded(_: Any = None) -> list[Tensor]:
        return [1 + 0.05 * torch.randn(1, generator=generator) for _ in range(count)]

    def found(actual: list[Tensor]) -> str | None:
        return difference([torch.ones(1)] * count, actual, rounded, (), gradients=count)

    assert found(rounded()) is None
    text = found([torch.full((1,), 2.0)] * count)
    if count < 64:
        assert text is None, "they do not tell enough"
    else:
        assert text is not None
        assert text.startswith("the rest of the gradients has a relative error of 1, allowed is ")


def test_an_input_without_a_gradient_has_zeros() -> None:
    x, unused = (torch.randn(3, requires_grad=True) for _ in range(2))
    programs = {"reference": lambda x, _: x * 2, "zeros": lambda x, unused: x * 2 + unused * 0}
    assert not compare(programs, [x, unused], for_training=True).wrong


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
@pytest.mark.filterwarnings("error")
def test_other_outputs_of_any_dtype_are_no_obstacle(dtype: torch.dtype) -> None:
    """Neither to random gradients, nor to the measurement of the noise."""

    def cubed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3, x.to(dtype)

    def off(x: Tensor) -> tuple[Tensor, Tensor]:
        return 1.011 * x**3, x.to(dtype)

    x = torch.randn(9, requires_grad=True)
    assert not compare({"reference": cubed, "off": off}, [x], for_training=True).wrong


def test_a_model_without_floating_point_inputs_has_no_noise() -> None:
    table = torch.randn(8, 4)
    programs = {"reference": lambda i: table[i], "wrong": lambda i: table[i] * 1.1}
    found = compare(programs, [torch.tensor([0, 3, 5])])
    assert found.wrong["wrong"].endswith("allowed is 0.01 (noise 0)")


def test_the_largest_noise_does_not_allow_everything() -> None:
    def unstable(x: Tensor) -> Tensor:
        return (x * 1e6).sin()

    x = torch.rand(1000)
    found = compare({"reference": unstable, "wrong": lambda x: -unstable(x)}, [x])
    assert "a relative error of 2, allowed is 0.5 " in found.wrong["wrong"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, 1:, ::2],
        lambda x: x[:, :1].expand(-1, 5, -1, -1),
        lambda x: x[0, 0, 0, 0],
        lambda x: x[:0],
    ],
    ids=["contiguous", "channels_last", "slice", "expanded", "scalar", "empty"],
)
def test_every_number_moves_by_its_last_places(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The reference gets inputs of the same layout; those that were given stay what they are."""
    x = view(torch.randn(2, 3, 4, 5).to(dtype))
    kept, given = x.clone(), []

    def reference(inputs: dict[str, Any]) -> list[Tensor]:
        given.append(inputs["x"])
        return [ones]

    ones = torch.ones(2, dtype=dtype)
    difference([ones], [2 * ones], reference, {"x": x, "n": 3})
    (moved,) = given
    assert torch.equal(x, kept)
    assert (moved.shape, moved.stride(), moved.dtype) == (x.shape, x.stride(), dtype)
    assert bool((moved != x).all())
    # Float32 may be computed in TF32, which has the eps of float16.
    eps = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    torch.testing.assert_close(moved, x, rtol=1.5 * eps, atol=0)


def test_the_least_number_of_a_mask_stays_finite() -> None:
    mask = torch.full((100,), torch.finfo(torch.float16).min, dtype=torch.float16)
    mask[0] = float("-inf")
    given = []

    def reference(inputs: Tensor) -> list[Tensor]:
        given.append(inputs)
        return [inputs]

    difference([mask], [mask / 2], reference, mask)
    assert torch.equal(given[0].isfinite(), mask.isfinite())


def test_weights_among_the_inputs_are_left_alone() -> None:
    x, weight = torch.ones(3), torch.ones(3)
    seen = []

    def program(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.clone(), weight.clone()))
        return x * weight

    compare({"reference": program, "wrong": lambda x, w: x + w}, [x, weight], weights=[1])
    assert all(torch.equal(w, weight) for _, w in seen)
    assert any(not torch.equal(given, x) for given, _ in seen)


def test_sizes_that_depend_on_the_data_have_no_noise() -> None:
    x = torch.ones(64)
    programs = {"reference": lambda x: x[x >= 1], "wrong": lambda x: x * 1.1}
    assert compare(programs, [x]).wrong["wrong"].endswith("(noise 0)")
