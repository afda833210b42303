"""``enable`` and ``disable``: state, arguments, what is recorded, and the kernels themselves.

The kernels that take the place of PyTorch's serve any backend. Registered for the CPU, where this
package's operators compute by ATen, they are tested without a GPU.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from support.conv.references import error_of
from support.conv.transforms import TRANSFORMS
from support.conv.upstream import (
    FUNCTIONS,
    WITH_ERRORS,
    check_op_errors,
    check_op_samples,
    op_samples,
)
from support.processes import enabling_beside_threads
from support.processes.subprocesses import evaluate, evaluate_forked, python, python_forked
from support.tuning.made_up_plans import plan_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import cudnn_autotune as ca
from cudnn_autotune import _C

pytestmark = pytest.mark.search


@pytest.fixture(autouse=True)
def disabled() -> Iterator[None]:
    ca.disable()
    yield
    ca.disable()


def policy() -> tuple[str, int] | None:
    """What is in force, left as it is."""
    found = _C.exchange_process_wide(None)
    _C.exchange_process_wide(found)
    return found and (found.sampling, found.workspace_limit)


@contextmanager
def unknown_mode() -> Iterator[None]:
    """Calls that are served fail within it, because no mode has this name."""
    former = _C.exchange_process_wide(_C.ProcessWidePolicy("no such mode", -1))
    try:
        yield
    finally:
        _C.exchange_process_wide(former)


def is_served(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> bool:
    with unknown_mode():
        try:
            function(*arguments, **keywords)
        except (ValueError, RuntimeError) as error:  # TorchScript makes the latter of the former
            return "'no such mode'" in str(error)
    return False


# State and arguments


def test_a_context_restores_what_was_before() -> None:
    with ca.enable():
        assert policy() == ("", -1)
        with ca.enable("race", workspace_limit=0):
            assert policy() == ("race", 0)
            ca.disable()
            assert policy() is None
        assert policy() == ("", -1)
    assert policy() is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("fastest",), "sampling"), (("",), "sampling"), ((None, -1), "workspace_limit")],
)
def test_bad_arguments_change_nothing(arguments: tuple[Any, ...], name: str) -> None:
    ca.enable("race", 0)
    with pytest.raises(ValueError, match=name):
        ca.enable(*arguments)
    assert policy() == ("race", 0)


@pytest.mark.slow
def test_other_devices_keep_pytorchs_kernels() -> None:
    """In a process of its own, where no kernel was registered for the CPU. PyTorch's warning of a
    kernel that takes the place of another does not show."""
    code = """
import torch, torch.nn.functional as F
import cudnn_autotune as ca
registered = torch._C._dispatch_has_kernel_for_dispatch_key
assert registered("aten::convolution", "CUDA")
x, w = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(6, 4, 3, 3)
before = F.conv2d(x, w)
with ca.enable("heuristic"):
    assert not registered("aten::convolution", "CPU")
    y = F.conv2d(x, w)
assert torch.equal(y, before) and y.grad_fn.name() == before.grad_fn.name()
assert ca.fallbacks() == {}
print("as before")
"""
    done = python_forked(code)
    assert done.stdout == "as before\n", done.stderr
    assert "registered kernel" not in done.stderr


def test_enabling_writes_no_table_of_kernels() -> None:
    """Other threads may be reading it: PyTorch's dispatcher does so without a lock."""
    code = """
import torch
import cudnn_autotune as ca
names = ("aten::convolution", "aten::convolution_backward")
table = lambda: [torch._C._dispatch_dump_table(name) for name in names]
before = table()
ca.enable("race")
assert table() == before, "enable() wrote it"
ca.disable()
assert table() == before, "disable() wrote it"
print(all("aten_kernels.cpp" in text for text in before))
"""
    assert evaluate_forked(code) == "True"


def test_threads_convolve_while_it_is_first_enabled() -> None:
    assert evaluate_forked(enabling_beside_threads.code("cpu", 4, 0, 50)) == "[] True"


def test_a_forked_process_inherits_the_state() -> None:
    code = """
import os, sys, torch
import cudnn_autotune as ca
kernels = ca._C.AtenKernels("CPU")
ca.enable("race")
child = os.fork()
if child == 0:
    x = torch.randn(1, 2, 4, 4)
    torch.conv2d(x, torch.randn(2, 2, 3, 3))
    os._exit(ca._C.exchange_process_wide(None).sampling != "race")
print(os.waitpid(child, 0)[1], ca._C.exchange_process_wide(None).sampling)
"""
    assert evaluate_forked(code) == "0 race"


# The variable CUDNN_AUTOTUNE_ENABLE


@pytest.mark.parametrize("first", ["torch", "cudnn_autotune"])
def test_a_variable_enables_a_process_that_imports_torch(first: str) -> None:
    """The package need not be imported by the program: torch does so at the end of its import."""
    code = f"""
import {first}
import sys
ca = sys.modules["cudnn_autotune"]
print(ca._C.exchange_process_wide(None) is not None)
"""
    done = python("-c", code, env={"CUDNN_AUTOTUNE_ENABLE": "1"})
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "cudnn-autotune" not in done.stderr  # there is nothing to tell


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_torch_does_not_import_the_package(value: str | None) -> None:
    code = "import sys, torch; print('cudnn_autotune' in sys.modules)"
    assert evaluate(code, value and {"CUDNN_AUTOTUNE_ENABLE": value}) == "False"


def test_another_value_of_the_variable_is_passed_over() -> None:
    code = "import torch, cudnn_autotune as ca; print(ca._C.exchange_process_wide(None))"
    done = python("-c", code, env={"CUDNN_AUTOTUNE_ENABLE": "yes"})
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert "CUDNN_AUTOTUNE_ENABLE must be 1 or 0, got 'yes': it is passed over" in done.stderr


@pytest.mark.parametrize(("rank", "ending"), [("0", "raise OSError('lost')"), ("1", "")])
def test_the_variable_has_a_summary_at_the_end(rank: str, ending: str) -> None:
    """After the traceback, if there is one, and of several ranks on the first."""
    code = f"""
import sys
from support.store.decisions import decision
from cudnn_autotune.tuning import choice_log
from cudnn_autotune.tuning.choice import Choice
choice_log.record(Choice(decision(), 0, origin="store"))
{ending}
"""
    done = python("-c", code, env={"CUDNN_AUTOTUNE_ENABLE": "1", "RANK": rank})
    assert done.returncode == (1 if ending else 0), done.stderr
    said = done.stderr.splitlines()
    summary = [line for line in said if line.startswith("cudnn-autotune: ")]
    if rank == "1":
        assert summary == []
        return
    assert summary[0] == "cudnn-autotune: 1 convolution served, 1 known from the store"
    assert summary == said[-len(summary) :]
    assert ("OSError: lost" in said) == bool(ending)


def test_a_command_decides_itself_what_is_enabled() -> None:
    code = """
import cudnn_autotune as ca
from cudnn_autotune_cli import main
main(["env", "--json"], standalone_mode=False)
print(ca._C.exchange_process_wide(None))
"""
    done = python("-c", code, env={"CUDNN_AUTOTUNE_ENABLE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("None\n")
    told = json.loads(done.stdout.removesuffix("None\n"))
    assert told["variables"]["CUDNN_AUTOTUNE_ENABLE"] == "1"
    assert told["not understood"] == {}


# What is recorded: PyTorch's own operators


def operators(function: Callable[..., Any], *arguments: Any) -> list[str]:
    graph = make_fx(function)(*arguments).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_traced_programs_hold_pytorchs_operators(on_cpu: None, device: str) -> None:
    def step(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        output = F.conv2d(input, weight, padding=1) + F.conv_transpose2d(input, weight, padding=1)
        if device == "cuda":  # autograd needs a GPU's streams
            return (output,)
        return torch.autograd.grad(output.sum(), (input, weight))

    with FakeTensorMode():
        tensors = [
            torch.empty(4, 4, *size, device=device, requires_grad=True) for size in [(9, 8), (3, 3)]
        ]
        before = operators(step, *tensors)
        with unknown_mode():
            assert operators(step, *tensors) == before
        assert operators(step, *tensors) == before
        assert before.count("aten.convolution.default") == 2
        assert before.count("aten.convolution_backward.default") == (2 if device == "cpu" else 0)


# The kernels


@pytest.mark.basic(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_db_samples(on_cpu: None, name: str, dtype: torch.dtype) -> None:
    check_op_samples(name, "cpu", dtype, exact=False, enabled=True)
    served = [is_served(getattr(F, name), x, *a, **k) for x, a, k in op_samples(name, "cpu", dtype)]
    # Of two samples the output padding is so large that they are no gradients of a convolution.
    assert served.count(False) <= (2 if "transpose" in name else 0)


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_op_db_errors(on_cpu: None, name: str) -> None:
    check_op_errors(name, "cpu", enabled=True)


DIRECT_CALLS: dict[str, dict[str, Any]] = {
    "list_of_three": {"stride": [1, 1, 1]},
    "negative_padding": {"padding": [-1, -1]},
    "large_stride": {"stride": [2**40, 2**40]},
    "zero_groups": {"groups": 0},
    "other_dtype": {"weight": torch.zeros(6, 4, 3, 3, dtype=torch.float64)},
    "other_rank": {"weight": torch.zeros(6, 4, 3)},
    "other_channels": {"weight": torch.zeros(6, 3, 3, 3)},
    "large_output_padding": {
        "transposed": True,
        "weight": torch.zeros(4, 6, 3, 3),
        "output_padding": [1, 1],
        "dilation": [2, 2],
    },
    "large_kernel": {"weight": torch.zeros(6, 4, 30, 30)},
    "long_bias": {"bias": torch.zeros(7)},
    "complex": {
        "input": torch.zeros(2, 4, 9, 8, dtype=torch.complex64),
        "weight": torch.zeros(6, 4, 3, 3, dtype=torch.complex64),
    },
}


@pytest.mark.parametrize("kind", DIRECT_CALLS)
def test_pytorch_computes_or_refuses_the_rest(on_cpu: None, kind: str) -> None:
    arguments: dict[str, Any] = {
        "input": torch.zeros(2, 4, 9, 8),
        "weight": torch.zeros(6, 4, 3, 3),
        "bias": None,
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
        **DIRECT_CALLS[kind],
    }

    def outcome() -> str:
        try:
            return str(torch.ops.aten.convolution(**arguments).shape)
        except (RuntimeError, ValueError) as error:
            return str(error)

    expected = outcome()
    with ca.enable():
        assert outcome() == expected
    assert sum(ca.fallbacks().values()) == 1
    assert not is_served(outcome)


def test_a_gradient_of_another_size_is_pytorchs_matter(on_cpu: None) -> None:
    def backward(shape: tuple[int, ...]) -> Any:
        input, weight = torch.ones(2, 4, 9, 8), torch.ones(6, 4, 3, 3)
        return torch.ops.aten.convolution_backward(
            torch.ones(shape),
            input,
            weight,
            [6],
            [1, 1],
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            [True, True, True],
        )

    assert is_served(backward, (2, 6, 7, 6))
    for shape in [(2, 6, 7, 5), (2, 5, 7, 6), (1, 6, 7, 6)]:
        expected = error_of(backward, shape)
        with ca.enable():
            assert error_of(backward, shape) == expected


def test_masked_gradients_are_not_computed(on_cpu: None) -> None:
    input, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3, requires_grad=True)
    with ca.enable():
        F.conv2d(input, weight).sum().backward()
    assert weight.grad is not None


def small(transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(2, 4, 5, 4), (4, 3, 3, 2) if transposed else (3, 4, 3, 2), (3,)]
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_derivatives(on_cpu: None, function: Callable[..., Tensor]) -> None:
    tensors = small(function is F.conv_transpose2d)

    def convolution(*tensors: Tensor) -> Tensor:
        return function(*tensors, stride=2, padding=1)

    with ca.enable():
        assert gradcheck(convolution, tensors, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(convolution, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(on_cpu: None, name: str) -> None:
    input, weight, _ = (t.detach() for t in small())
    expected = TRANSFORMS[name](input, weight)
    with ca.enable():
        torch.testing.assert_close(TRANSFORMS[name](input, weight), expected)
    assert is_served(TRANSFORMS[name], input, weight)


def test_our_own_calls_of_pytorch_are_not_served(on_cpu: None) -> None:
    """Else an operator that computes by ATen would call itself."""
    input, weight, bias = small()
    arguments = ([1, 1], [0, 0], [1, 1], 1)
    expected = F.conv2d(input, weight, bias)
    with unknown_mode():
        output = torch.ops.cudnn_autotune.conv_fprop(input, weight, bias, *arguments)
        assert torch.equal(output, expected)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(input, input.cos())
            torch.ops.cudnn_autotune.conv_fprop(dual, weight, bias, *arguments)


@pytest.mark.search
def test_convolutions_of_a_users_function_are_not_served(on_cpu: None) -> None:
    """Else a function that computes a problem by another convolution might call itself."""
    problem = ca.ConvProblem("fprop", (1, 2, 5, 5), (3, 2, 3, 3))
    x, w, y = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), torch.empty(1, 3, 3, 3)
    expected = F.conv2d(x, w)
    plan = plan_of("mine@1", problem, lambda x, w, y, workspace: y.copy_(F.conv2d(x, w)))
    with unknown_mode():
        assert torch.equal(_C.execute(plan, x, w, y), expected)


def test_it_can_be_switched_while_other_threads_run(on_cpu: None) -> None:
    layer, input = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = layer(input)
    failures: list[object] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                output = layer(input)
                output.sum().backward()
                assert torch.equal(output, expected)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for index in range(2000):
        ca.enable("race" if index % 2 else "heuristic", index % 3)
        ca.disable()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
