"""Fused problems and their operator: activation(conv(input, weight) + bias + residual)."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.conv.fused_cases import FUNCTIONS, NAMES
from support.conv.problems import make
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_autotune as ca
from cudnn_autotune.engines.activations import PARAMETERS, Activation
from cudnn_autotune.engines.problem_json import (
    problem_from_json,
    problem_from_text,
    problem_text,
    problem_to_json,
)
from cudnn_autotune.timers.measuring import operands, run_operator
from cudnn_autotune.tuning.checking import relative_error, tolerance

problem_of = partial(make, "resnet_fp16_nhwc")
GEOMETRY = ([2, 1], [1, 0], [1, 2], 2)  # stride, padding, dilation, groups


def fused(*operands: Tensor | None, activation: str = "", slope: Tensor | None = None) -> Tensor:
    output: Tensor = torch.ops.cudnn_autotune.conv_fused(
        *operands, *GEOMETRY, activation, slope=slope
    )
    return output


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 8), (6, 2, 3, 2), (6,), (2, 6, 5, 6))
    x, w, b, r = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.to(dtype), w.to(dtype), b.to(dtype), r.to(dtype)


@pytest.mark.basic(8)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_operator_computes_what_its_parts_compute(
    activation: str, has_bias: bool, has_residual: bool
) -> None:
    x, w, b, r = tensors()
    expected = F.conv2d(x, w, b if has_bias else None, *GEOMETRY)
    expected = FUNCTIONS[activation](expected + r if has_residual else expected)
    found = fused(x, w, b if has_bias else None, r if has_residual else None, activation=activation)
    assert torch.equal(found, expected)


SLOPE = torch.tensor([0.0, 0.25, -0.5, 1.0, 1.5, 0.01], dtype=torch.float64)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_prelu_has_a_slope_for_each_channel(
    has_bias: bool, has_residual: bool, dtype: torch.dtype
) -> None:
    x, w, b, r = tensors(dtype)
    slope = SLOPE.to(dtype)
    expected = F.conv2d(x, w, b if has_bias else None, *GEOMETRY)
    expected = F.prelu(expected + r if has_residual else expected, slope)
    given = (x, w, b if has_bias else None, r if has_residual else None)
    assert torch.equal(fused(*given, activation="prelu", slope=slope), expected)
    into = torch.empty_like(expected)
    torch.ops.cudnn_autotune.conv_fused_into_(into, *given, *GEOMETRY, "prelu", slope=slope)
    assert torch.equal(into, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("activation", "slope", "message"),
    [
        ("prelu", None, "slope must be a tensor with the activation prelu, and None with any"),
        ("relu", SLOPE, "slope must be a tensor with the activation prelu, and None with any"),
        ("prelu", SLOPE[:1], r"slope must have the shape \(6,\) and .*, got \[1\]"),
        ("prelu", SLOPE.float(), r"slope must have the shape \(6,\) and .*, got \[6\] .*[Ff]loat"),
        ("prelu", SLOPE.reshape(2, 3), r"slope must have the shape \(6,\) and .*, got \[2, 3\]"),
    ],
)
def test_another_slope_is_refused(
    device: str, activation: str, slope: Tensor | None, message: str
) -> None:
    """CUDA tensors are fake here, as they are while a graph is traced."""
    with FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else nullcontext():
        given = [None if t is None else t.to(device) for t in (*tensors(), slope)]
        with pytest.raises(ValueError, match=message):
            fused(*given[:-1], activation=activation, slope=given[-1])


def test_prelu_without_a_batch_is_refused() -> None:
    """The output's channels are its first dimension then, and PyTorch has slopes along the second
    one, here of the same size."""
    x, w, slope = torch.randn(4, 8), torch.randn(6, 4, 3), torch.randn(6)
    geometry = ([1], [0], [1], 1)
    with pytest.raises(ValueError, match="input must have a batch with the activation prelu"):
        torch.ops.cudnn_autotune.conv_fused(x, w, None, None, *geometry, "prelu", slope=slope)


@pytest.mark.parametrize("activation", ["silu", "prelu"])
def test_the_operator_fulfils_what_torch_expects_of_operators(activation: str) -> None:
    arguments = (*tensors(torch.float32), *GEOMETRY, activation)
    slope = {"slope": SLOPE.float()} if activation == "prelu" else {}
    checks = ("test_schema", "test_faketensor")  # it stands below autograd
    found = torch.library.opcheck(
        torch.ops.cudnn_autotune.conv_fused, arguments, slope, test_utils=checks
    )
    assert set(found.values()) == {"SUCCESS"}


def test_on_cuda_the_result_is_channels_last_where_an_operand_is() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, 9, 8, device="cuda").to(memory_format=torch.channels_last)
        w, b = torch.empty(6, 2, 3, 2, device="cuda"), torch.empty(6, device="cuda")
        r = torch.empty(2, 6, 5, 6, device="cuda")
        found = fused(x, w, b, r, activation="silu")
        assert found.shape == r.shape
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("on", ["cpu", "fake cuda"])
def test_a_residual_of_another_shape_is_refused(on: str) -> None:
    x, w, b, r = tensors()
    if on == "cpu":
        with pytest.raises(ValueError, match="residual must have the output's shape"):
            fused(x, w, b, r[:1], activation="relu")
        return
    shapes = [t.shape for t in (x, w, b, r[:1])]
    with FakeTensorMode(), pytest.raises(RuntimeError, match="residual must be of size"):
        fused(*(torch.empty(shape, device="cuda") for shape in shapes), activation="relu")


NO_ACTIVATIONS = [
    "softplus",
    "leaky_relu",
    "leaky_relu()",
    "leaky_relu(",
    "leaky_relu(0.1",
    "leaky_relu(0.1))",
    "leaky_relu(0)",
    "leaky_relu(-0.1)",
    "leaky_relu(0.00001)",
    "leaky_relu(1001)",
    "leaky_relu(nan)",
    "leaky_relu(inf)",
    "leaky_relu(0.1, 2)",
    "relu(0.1)",
    "(0.1)",
    "relu6 ",
]


@pytest.mark.parametrize("name", NO_ACTIVATIONS)
def test_an_unknown_activation_is_refused(name: str) -> None:
    allowed = r"'', relu, silu.* leaky_relu\(PARAMETER\), elu\(PARAMETER\), prelu"
    range_of = "where PARAMETER is from 0.0001 to 1000"
    message = rf"activation must be one of {allowed}, {range_of}, got '{re.escape(name)}'"
    with pytest.raises(ValueError, match=message):
        fused(*tensors(), activation=name)
    with pytest.raises(ValueError, match=message.replace("one of '',", "'' or one of")):
        problem_of(activation=name)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_parameter_is_the_same_text_and_key_everywhere(kind: str) -> None:
    rng = random.Random(0)
    drawn = [10 ** rng.uniform(-4, 3) for _ in range(200)]
    for parameter in (1e-4, 0.01, 0.1, 11 / 48, 1.0, 2.0, 1e3, *drawn):
        name = Activation(kind, parameter).name
        assert Activation.named(name) == Activation(kind, parameter)
        problem = problem_of(activation=name)
        assert problem.text == problem_text(problem)
        assert problem.text.endswith(f" {name}")
        assert problem_from_text(problem.text) == problem
        assert ca.ConvProblem.from_native(problem.native()) == problem
    assert problem_of(activation=f"{kind}(0.20)") == problem_of(activation=f"{kind}(0.2)")
    assert problem_of(activation=f"{kind}(1.0)").activation == f"{kind}(1)"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", NAMES)
def test_what_is_not_finite_becomes_what_pytorch_makes_of_it(
    activation: str, dtype: torch.dtype
) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 100.0, -100.0], dtype=dtype)
    x = x.reshape(1, 1, 1, -1)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    found = torch.ops.cudnn_autotune.conv_fused(
        x, one, None, None, [1, 1], [0, 0], [1, 1], 1, activation
    )
    assert torch.equal(found.isnan(), FUNCTIONS[activation](x).isnan())
    torch.testing.assert_close(found, FUNCTIONS[activation](x), equal_nan=True)


def test_prelu_of_what_is_not_finite() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 5.0, -5.0]).reshape(1, 1, 1, -1)
    one, slope = torch.ones(1, 1, 1, 1), torch.tensor([0.25])
    found = torch.ops.cudnn_autotune.conv_fused(
        x, one, None, None, [1, 1], [0, 0], [1, 1], 1, "prelu", slope=slope
    )
    torch.testing.assert_close(found, F.prelu(x, slope), equal_nan=True)


EPILOGUES = [
    {"bias": True},
    {"residual": True, "activation": "relu"},
    {"bias": True, "residual": True, "activation": "gelu_tanh"},
    {"activation": "hardswish"},
    {"bias": True, "activation": "leaky_relu(0.1)"},
    {"bias": True, "activation": "leaky_relu(0.2)"},
    {"bias": True, "activation": "elu(0.2)"},
    {"residual": True, "activation": "prelu"},
]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_a_fused_problem_is_written_and_read(epilogue: dict[str, object]) -> None:
    problem = problem_of(**epilogue)
    assert problem.is_fused
    assert problem_from_json(problem_to_json(problem)) == problem
    assert problem_from_text(problem_text(problem)) == problem
    assert problem_text(problem) == problem.text
    assert ca.ConvProblem.from_native(problem.native()) == problem


def test_problems_that_differ_in_their_epilogue_are_different_keys() -> None:
    texts = {problem_of(**epilogue).text for epilogue in [{}, *EPILOGUES]}
    keys = {ca._C.problem_key(problem_of(**e).native()) for e in [{}, *EPILOGUES]}
    assert len(texts) == len(keys) == 1 + len(EPILOGUES)


@pytest.mark.parametrize("name", ["h100", "h200", "a100"])
@pytest.mark.parametrize("epilogue", EPILOGUES[0:1] + EPILOGUES[2:3], ids=str)
def test_cudnn_lists_engines_of_fused_problems(name: str, epilogue: dict[str, object]) -> None:
    """Those that are compiled at run time need the driver, which a property file does not bring."""
    epilogue = epilogue | ({"activation": "relu"} if "activation" in epilogue else {})
    problem = problem_of(**epilogue)
    engines = {c.engine for c in ca.expert.candidates(problem, device=name)}
    assert engines
    unfused = problem_of()
    assert engines != {c.engine for c in ca.expert.candidates(unfused, device=name)}


@pytest.mark.parametrize("activation", [*NAMES, "prelu"])
@pytest.mark.parametrize("dims", [2, 3])
def test_cudnn_takes_the_graph_of_every_activation(dims: int, activation: str) -> None:
    """Without the driver 9.24 lists a precompiled engine for some of them, and none for others."""
    problem = ca.ConvProblem(
        "fprop",
        (2, 64, *[14] * dims),
        (64, 64, *[3] * dims),
        padding=1,
        dtype=torch.float16,
        memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[dims],
        bias=True,
        residual=True,
        activation=activation,
    )
    engines = {c.engine for c in ca.expert.candidates(problem, device="h100")}
    kind = activation.partition("(")[0]
    version = torch.backends.cudnn.version()
    if kind in ("relu", "sigmoid", "elu") and version is not None and version >= 92400:
        assert 0 in engines
    assert kind != "tanh" or 0 not in engines  # its results are not finite


def test_no_engine_rounds_the_parameter_of_a_float64_problem() -> None:
    def query(parameter: str, dtype: torch.dtype) -> None:
        problem = problem_of(dtype=dtype, bias=True, activation=f"elu({parameter})")
        ca.expert.candidates(problem, device="h100")

    query("0.5", torch.float64)
    query("0.1", torch.float32)
    with pytest.raises(ca.CudnnError, match="the frontend takes a float32"):
        query("0.1", torch.float64)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_accepts_the_right_output_and_no_other(
    epilogue: dict[str, object], dtype: torch.dtype
) -> None:
    small = {"dtype": dtype, "input_shape": (2, 8, 9, 9), "weight_shape": (16, 8, 3, 3)}
    problem = problem_of(**epilogue, **small)
    data = operands(problem, "cpu")
    right = run_operator(problem, data, "heuristic")
    wrong = run_operator(problem_of(**small), data[:3], "heuristic")

    def error_of(output: Tensor) -> float:
        def run() -> None:
            data[2].copy_(output)

        error = relative_error(problem, run, *data)
        assert error is not None
        return error

    assert error_of(right) <= tolerance(problem)
    assert error_of(wrong) > tolerance(problem)


def test_atens_path_of_a_fused_problem_is_its_parts() -> None:
    small = {"dtype": torch.float32, "input_shape": (2, 64, 9, 9)}
    problem = problem_of(bias=True, residual=True, activation="silu", **small)
    x, w, y, b, r = operands(problem, "cpu")
    plan = ca._C.build_plan(problem.native(), "aten", 0)
    found = ca._C.execute(plan, x, w, y, b, r)
    n = problem.spatial_dims
    expected = F.silu(F.conv2d(x, w, b, problem.stride, problem.padding[:n]) + r)
    assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match="the problem has 5, got 3"):
        ca._C.execute(plan, x, w, y)
