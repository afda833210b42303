"""Bad input gives an error that names the argument and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.problems import SHIPPED_GPUS, make
from support.tuning.strategies import BUILT_IN_MODES

import cudnn_autotune as ca
from cudnn_autotune import sampling
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.engines.configs import OWN_PATH


@pytest.fixture
def input() -> torch.Tensor:
    return torch.randn(2, 4, 9, 8)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(6, 4, 3, 3)


def test_unknown_mode_in_a_call(input: torch.Tensor, weight: torch.Tensor) -> None:
    """Also on the CPU, where no mode matters: a typo must not wait for the GPU."""
    with pytest.raises(ValueError) as error:
        ca.functional.conv2d(input, weight, sampling="fastest")
    assert "sampling" in str(error.value)
    assert "fastest" in str(error.value)
    assert all(mode in str(error.value) for mode in BUILT_IN_MODES)


def test_negative_workspace_limit_in_a_call(input: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="workspace_limit"):
        ca.functional.conv2d(input, weight, workspace_limit=-1)


@pytest.mark.search
@pytest.mark.parametrize("device", ["h300", "", "H200!", "tpu", "cpu", torch.device("cpu"), 1.5])
def test_unknown_devices_are_named_with_the_allowed(device: object) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        ca.expert.candidates(make("grouped_fp16"), device=device)  # type: ignore[arg-type]
    message = str(error.value)
    assert "device" in message
    assert all(name in message for name in SHIPPED_GPUS)


@pytest.mark.search
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda:0")], ids=str)
def test_no_gpu_to_ask(device: object) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        ca.expert.candidates(make("grouped_fp16"), device=device)  # type: ignore[arg-type]
    message = str(error.value)
    assert "device" in message
    assert "GPU" in message
    assert "h200" in message, "say what works without one"


@pytest.mark.search
@pytest.mark.parametrize("limit", [-1, -(1 << 33)])
def test_negative_workspace_limit_in_a_search(limit: int) -> None:
    with pytest.raises(ValueError, match="workspace_limit"):
        ca.expert.candidates(make("grouped_fp16"), device="l4", workspace_limit=limit)


@pytest.mark.search
@pytest.mark.parametrize(
    "text", ["eng99999", "eng0:KERNEL_CFG=123456", "eng0:TILE_CGA_M=77,TILE_CGA_N=99"]
)
def test_configs_that_do_not_exist(text: str) -> None:
    """A well-formed text that cuDNN refuses: the call, the status and the problem."""
    problem = make("resnet_fp16_nhwc")
    with pytest.raises(ca.CudnnError) as error:
        ca.expert.build_plan(problem, text, device="h200")
    message = str(error.value)
    assert problem.text in message
    assert text in message
    assert "CUDNN_" in message


PROBLEM = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 8, 3, 3))
STORED = ca.Selection((ca.Measurement(OWN_PATH, 1.0, 1),), 1)
TENSOR = torch.zeros(1)


class Mode:
    name = "a mode of nobody"

    def select(self, candidates: Any, timer: Any, limits: Any) -> None: ...


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ca.expert.candidates("x"), "problem must be a ConvProblem, got 'x'"),
        (lambda: ca.expert.build_plan(7, "eng0"), "problem must be a ConvProblem, got 7"),
        (lambda: ca.expert.build_plan(PROBLEM, 5, "h200"), "engine_text must be a text, got 5"),
        (lambda: ca.expert.parse_engine_text(None), "text must be a text, got None"),
        (lambda: ca.expert.engine_text("eng0", {}), "engine must be an int, got 'eng0'"),
        (lambda: ca.expert.engine_text(0, ["A"]), "knobs must be a mapping of names to ints"),
        (lambda: ca.expert.engine_text(0, {"A": "b"}), "knobs must be a mapping of names to ints"),
        (lambda: ca.expert.execute("x", "eng0", TENSOR, TENSOR), "problem must be a ConvProblem"),
        (
            lambda: ca.expert.execute(PROBLEM, 0, TENSOR, TENSOR),
            "engine_text must be a text, got 0",
        ),
        (
            lambda: ca.expert.execute(PROBLEM, "eng0", TENSOR, [1.0]),
            r"b must be a tensor, got \[1.0\]",
        ),
        (lambda: ca.expert.measure("x", ["eng0"]), "problem must be a ConvProblem"),
        (lambda: ca.expert.measure(PROBLEM, "eng0"), "texts must be a list of .*, got 'eng0'"),
        (lambda: ca.expert.measure(PROBLEM, [5]), "each of texts must be a text, got 5"),
        (lambda: ca.pin("x", "eng0"), "problem must be a ConvProblem"),
        (lambda: ca.pin(PROBLEM, 5), "engine_text must be a text"),
        (lambda: sampling.register(object()), "strategy must have a name and a method select"),
        (lambda: sampling.register(Mode), "strategy must be an instance, got the class Mode"),
        (lambda: ca.Store(environment="x"), "environment must be an Environment, got 'x'"),
    ],
)
def test_what_is_of_another_type_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
    assert Mode.name not in sampling.names()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ca.expert.measure(PROBLEM, ["eng0"], rounds="3"),
            "rounds must be an int .*, got '3'",
        ),
        (
            lambda: ca.expert.measure(PROBLEM, ["eng0"], target_ms=None),
            "target_ms must be a finite",
        ),
        (lambda: sampling.get("fastest"), "sampling must be one of .*, got 'fastest'"),
    ],
)
def test_what_is_out_of_range_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.search
def test_an_error_leaves_the_library_usable() -> None:
    """cuDNN keeps a last-error string per thread; ours must not trip over it."""
    problem = make("resnet_fp16_nhwc")
    good = ca.expert.candidates(problem, device="h200")[0].text
    for _ in range(3):
        with pytest.raises(ca.CudnnError):
            ca.expert.build_plan(problem, "eng99999", device="h200")
        assert ca.expert.build_plan(problem, good, device="h200").text == good


@pytest.mark.skipif(extension_available(), reason="there is a cuDNN to search")
def test_without_cudnn_a_search_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        ca.expert.candidates(make("grouped_fp16"), device="h200")


@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "groups"),
    [
        ((2, 4, 9, 8), (6, 3, 3, 3), 1),
        ((2, 4, 9, 8), (6, 4, 3, 3), 2),
        ((2, 4, 9, 8), (5, 2, 3, 3), 2),
        ((2, 4, 9, 8), (6, 4, 3, 3), 0),
        ((2, 4, 9), (6, 4, 3, 3), 1),
        ((2, 4, 9, 8), (6, 4, 30, 3), 1),
    ],
    ids=str,
)
def test_ops_refuse_what_does_not_fit(
    input_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int
) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        torch.ops.cudnn_autotune.conv_fprop(
            torch.randn(input_shape), torch.randn(weight_shape), None, [1, 1], [0, 0], [1, 1],
            groups,
        )  # fmt: skip


# A grad_output of another convolution would make a kernel read or write out of bounds.


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        ("dgrad", [2, 4, 9, 8], [(2, 4, 9), (2, 4, 20, 20), (3, 4, 9, 8), (2, 5, 9, 8)]),
        ("wgrad", [6, 4, 3, 3], [(6, 4, 3), (6, 4, 5, 5), (7, 4, 3, 3), (6, 2, 3, 3)]),
    ],
)
def test_gradients_refuse_a_size_that_does_not_fit(
    op: str, right: list[int], wrong: list[tuple[int, ...]]
) -> None:
    function = getattr(torch.ops.cudnn_autotune, f"conv_{op}")
    grad_output, other = torch.randn(2, 6, 7, 6), {"dgrad": (6, 4, 3, 3), "wgrad": (2, 4, 9, 8)}
    given = (grad_output, torch.randn(other[op]))
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    function(*given, right, *geometry)
    for size in wrong:
        with pytest.raises((RuntimeError, ValueError)):
            function(*given, size, *geometry)


@pytest.mark.parametrize("argument", ["stride", "padding", "dilation"])
def test_ops_refuse_lists_of_the_wrong_length(argument: str) -> None:
    values = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    values[argument] = [1, 1, 1]
    with pytest.raises((RuntimeError, ValueError), match=argument):
        torch.ops.cudnn_autotune.conv_fprop(
            torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3), None, *values.values(), 1
        )
