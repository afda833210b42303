"""Recipes become plans. Kernels and engines run on a GPU only (tests/gpu/test_recipes_gpu.py);
what can be refused without one is refused here."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines import recipe_plan as conversion
from cudnn_autotune.engines.recipe import (
    Address,
    CompiledKernel,
    EngineLaunch,
    Int64,
    KernelLaunch,
    PythonLaunch,
    Recipe,
    TensorMap,
)
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.timers.measuring import operands

pytestmark = pytest.mark.search

SIZES: dict[str, Any] = {
    "input_shape": (2, 16, 6, 6), "weight_shape": (8, 16, 3, 3),
    "dtype": torch.float16, "memory_format": torch.channels_last,
}  # fmt: skip
PROBLEM = ca.ConvProblem("fprop", **SIZES)
FUSED = ca.ConvProblem("fprop", **SIZES, bias=True, residual=True, activation="relu")
X, W, Y = (Address(buffer) for buffer in ("x", "w", "y"))  # type: ignore[arg-type]
KERNEL = KernelLaunch(CompiledKernel(b"code", "add"), (4, 1, 1), (64, 1, 1), (Y, X, 3))
ENGINE = EngineLaunch(PROBLEM, "eng0", X, W, Y)
# All pixels of x but the first, in boxes of 8 channels and 4 pixels.
MAP = TensorMap(Address("x", 32), "float16", (16, 71), (32,), (8, 4))


def plan(*launches: Any, problem: ca.ConvProblem = PROBLEM, workspace_bytes: int = 0) -> _C.Plan:
    return recipe_plan(problem, "mine@1:A=2", Recipe(launches, workspace_bytes), 0)


# What Python runs


def test_functions_are_called_in_their_order_with_all_tensors() -> None:
    data = operands(FUSED, "cpu")
    calls: list[tuple[str, tuple[torch.Tensor, ...]]] = []
    one = plan(
        PythonLaunch(lambda *tensors: calls.append(("first", tensors))),
        PythonLaunch(lambda *tensors: calls.append(("second", tensors))),
        problem=FUSED,
    )
    assert (one.text, one.workspace_bytes, one.is_read_back) == ("mine@1:A=2", 0, False)
    assert _C.execute(one, *data) is data[2]
    assert [name for name, _ in calls] == ["first", "second"]
    for _, (*given, workspace) in calls:
        assert all(a is b for a, b in zip(given, data, strict=True))
        assert (workspace.shape, workspace.dtype) == ((0,), torch.uint8)


def test_a_function_is_given_the_workspace() -> None:
    data, workspace = operands(PROBLEM, "cpu"), torch.zeros(120, dtype=torch.uint8)
    one = plan(PythonLaunch(lambda *tensors: tensors[-1].fill_(5)), workspace_bytes=100)
    assert one.workspace_bytes == 100
    _C.execute(one, *data, workspace=workspace)
    assert workspace.tolist() == [5] * 100 + [0] * 20
    for wrong in (workspace[:99], torch.zeros(120, dtype=torch.uint8, device="meta")):
        with pytest.raises(ValueError, match="workspace must have 100 bytes or more"):
            _C.execute(one, *data, workspace=wrong)


@pytest.mark.parametrize(("op", "written"), [("fprop", 2), ("dgrad", 0), ("wgrad", 1)])
def test_the_result_is_what_the_operation_writes(op: str, written: int) -> None:
    problem = replace(PROBLEM, op=op)
    data = operands(problem, "cpu")
    one = plan(PythonLaunch(lambda *tensors: tensors[written].fill_(7.0)), problem=problem)
    assert _C.execute(one, *data) is data[written]
    assert bool((data[written] == 7.0).all())


def test_an_error_names_the_candidate_and_what_follows_does_not_run() -> None:
    ran = []

    def fail(*tensors: object) -> None:
        raise ValueError("it is too large")

    one = plan(PythonLaunch(fail), PythonLaunch(lambda *tensors: ran.append(1)))
    with pytest.raises(_C.PlanError, match=r"^mine@1:A=2: ValueError: it is too large$"):
        _C.execute(one, *operands(PROBLEM, "cpu"))
    assert ran == []


def test_a_plan_lets_go_of_its_functions_and_holds_no_tensors() -> None:
    class Function:
        def __call__(self, *tensors: object) -> None:
            pass

    function, data = Function(), operands(PROBLEM, "cpu")
    alive, storage = weakref.ref(function), weakref.ref(data[0].untyped_storage())
    one = plan(PythonLaunch(function))
    del function
    _C.execute(one, *data)
    del data
    gc.collect()
    assert storage() is None
    assert alive() is not None
    del one
    assert alive() is None


# What C++ is given


def test_launches_become_plain_tuples() -> None:
    arguments = (X, Address("workspace", 512), -3, Int64(2**40), 0.5, MAP)
    launch = replace(KERNEL, arguments=arguments, shared_bytes=1024, cluster=(2, 1, 1))
    assert conversion._native(launch, 0) == (
        "kernel", b"code", "add", (4, 1, 1), (64, 1, 1), (2, 1, 1), 1024,
        (("x", 0), ("workspace", 512), ("int32", -3), ("int64", 2**40), ("float", 0.5),
         ("tensor_map", ("x", 32), "float16", (16, 71), (32,), (8, 4), 0)),
    )  # fmt: skip
    fused = EngineLaunch(FUSED, "eng3", X, W, Y, Address("bias"), Address("y", 64))
    kind, native, *rest = conversion._native(fused, 0)
    assert isinstance(native, _C.ConvProblem)
    assert (kind, native.text) == ("engine", FUSED.text)
    assert rest == ["eng3", ("x", 0), ("w", 0), ("y", 0), ("bias", 0), ("y", 64)]
    assert conversion._native(ENGINE, 0)[-2:] == (None, None)
    assert conversion._native(PythonLaunch(print), 0) == ("python", print)


def test_other_launches_are_refused() -> None:
    with pytest.raises(TypeError, match="no launch of a recipe"):
        plan(print)
    with pytest.raises(ValueError, match="at least one"):
        plan()
    with pytest.raises(ValueError, match="workspace_bytes"):
        plan(PythonLaunch(print), workspace_bytes=-1)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"grid": (-1, 1, 1)}, "kind 'kernel'"),
        ({"grid": (1, 1)}, "kind 'kernel'"),
        ({"block": (2**32, 1, 1)}, "kind 'kernel'"),
        ({"shared_bytes": 2**40}, "kind 'kernel'"),
        ({"arguments": (Int64(2**63),)}, "kind 'kernel'"),
        ({"arguments": (Address("z"),)}, "buffer must be one of x, w, .* got 'z'"),  # type: ignore[arg-type]
        ({"cluster": (1, 1)}, "kind 'kernel'"),
        (
            {"arguments": (replace(MAP, element="int8"),)},
            "element must be one of float16, .*'int8'",
        ),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan(replace(KERNEL, **changes))


@pytest.mark.parametrize("cluster", [(3, 1, 1), (1, 2, 1), (0, 1, 1), (16, 1, 1)])
def test_a_cluster_divides_the_grid_and_has_8_blocks_at_most(cluster: tuple[int, int, int]) -> None:
    launch = replace(KERNEL, grid=(32, 1, 1), cluster=cluster)
    with pytest.raises(_C.PlanError, match="mine@1:A=2: add: cluster must have 1 to 8 blocks"):
        plan(launch)


# Tensor maps


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shape": (16, 72)}, "the tensor must lie in its buffer"),
        ({"strides": (48,)}, "the tensor must lie in its buffer"),
        ({"address": Address("x", -16)}, "offset -16 is outside of x"),
        ({"address": Address("bias")}, "the tensor must lie in its buffer"),
        ({"address": Address("x", 8), "shape": (8, 1)}, "offset 8 in x is not known .* the 16"),
        ({"shape": (16, 0)}, "shape must be 1 to 2\\*\\*32"),
        ({"shape": (-1, 71)}, "shape must be 1 to 2\\*\\*32"),
        ({"shape": (2,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "shape must have 1 to 5"),
        ({"shape": (), "strides": (), "box": ()}, "shape must have 1 to 5"),
        ({"strides": ()}, "strides must have a dimension less than shape"),
        ({"strides": (24,)}, "strides must be multiples of 16 bytes"),
        ({"box": (8,)}, "box must have as many dimensions as shape"),
        ({"box": (8, 257)}, "box must be 1 to 256"),
        ({"box": (4, 4)}, "box must have rows of a multiple of 16 bytes"),
        ({"box": (32, 4), "swizzle_bytes": 32}, "box must have rows of at most swizzle_bytes"),
        ({"swizzle_bytes": 48}, "swizzle_bytes must be 0, 32, 64 or 128"),
    ],
)
def test_a_tensor_map_that_tma_does_not_take_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(_C.PlanError, match=f"^mine@1:A=2: .*{what}"):
        plan(replace(KERNEL, arguments=(replace(MAP, **changes), Y)))


# Addresses


@pytest.mark.parametrize(
    ("address", "bytes_"),
    [
        (Address("x", 2 * 16 * 36 * 2), 2304),
        (Address("w", 2304), 2304),
        (Address("y", 2 * 8 * 16 * 2), 512),
        (Address("y", -2), 512),
        (Address("bias"), 0),
        (Address("residual"), 0),
        (Address("workspace", 1000), 1000),
        (Address("workspace", 2**40), 1000),
    ],
)
def test_an_address_is_in_its_buffer(address: Address, bytes_: int) -> None:
    message = (
        f"mine@1:A=2: offset {address.offset} is outside of {address.buffer}, which has {bytes_} "
    )
    with pytest.raises(_C.PlanError, match=message):
        plan(replace(KERNEL, arguments=(X, address)), workspace_bytes=1000)
    with pytest.raises(_C.PlanError, match=message):
        plan(replace(ENGINE, w=address), workspace_bytes=1000)


@pytest.mark.parametrize("offset", [2, 16, 48])
def test_an_engine_is_given_addresses_as_aligned_as_it_asks_for(offset: int) -> None:
    message = f"offset {offset} in y is not known to be a multiple of the 32 bytes that eng0 asks"
    with pytest.raises(_C.PlanError, match=message):
        plan(replace(ENGINE, y=Address("y", offset)))


def test_operands_are_no_more_aligned_than_the_problem_says() -> None:
    with pytest.raises(_C.PlanError, match="offset 0 in x is not known to be a multiple of the 32"):
        plan(ENGINE, problem=replace(PROBLEM, alignment=(16, 32, 32)))


def test_an_engine_that_adds_a_bias_is_given_one() -> None:
    with pytest.raises(_C.PlanError, match="lacks a tensor of its epilogue, or is given one more"):
        plan(replace(ENGINE, problem=FUSED))
    with pytest.raises(_C.PlanError, match="lacks a tensor of its epilogue, or is given one more"):
        plan(replace(ENGINE, bias=Y))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_kernels_and_engines_are_not_loaded() -> None:
    with_map = replace(KERNEL, arguments=(MAP, Y), cluster=(2, 1, 1))
    for launch in (KERNEL, ENGINE, with_map):
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):
            plan(launch)
