"""Plans of recipes, which C++ runs."""

from __future__ import annotations

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import (
    Address,
    Argument,
    CompiledKernel,
    EngineLaunch,
    Int64,
    KernelLaunch,
    PythonLaunch,
    Recipe,
    TensorMap,
)
from cudnn_autotune.engines.recipe_checks import check_recipe


def recipe_plan(problem: ConvProblem, text: str, recipe: Recipe, device: int) -> _C.Plan:
    """Compiles and loads a recipe's kernels and engines.

    Args:
        text: of the candidate.
        device: the index of a CUDA device.

    Raises:
        TypeError: a launch or an argument is of no kind that recipes have.
        ValueError: there are no launches, a buffer has another name, or a number does not fit.
        PlanError: a kernel does not compile or load, an engine does not build, or
            ``check_recipe`` refuses the recipe.
    """
    check_recipe(recipe, problem, text)
    launches = [_native(launch, device) for launch in recipe.launches]
    return _C.recipe_plan(problem.native(), text, launches, recipe.workspace_bytes, device)


def _native(
    launch: KernelLaunch | EngineLaunch | PythonLaunch, device: int
) -> _C.KernelLaunch | _C.EngineLaunch | _C.PythonLaunch:
    if isinstance(launch, PythonLaunch):
        return "python", launch.function
    if isinstance(launch, EngineLaunch):
        return (
            "engine",
            launch.problem.native(),
            launch.engine_text,
            _address(launch.x),
            _address(launch.w),
            _address(launch.y),
            None if launch.bias is None else _address(launch.bias),
            None if launch.residual is None else _address(launch.residual),
        )
    if not isinstance(launch, KernelLaunch):
        raise TypeError(f"launches: {launch!r} is no launch of a recipe")
    kernel = launch.kernel
    if isinstance(kernel, CompiledKernel):
        code = kernel.cubin
    else:
        code = cubin(kernel, torch.cuda.get_device_capability(device))
    arguments = tuple(map(_argument, launch.arguments))
    size = (launch.grid, launch.block, launch.cluster, launch.shared_bytes)
    return ("kernel", code, kernel.function, *size, arguments)


def _address(address: Address) -> _C.Address:
    return address.buffer, address.offset


def _argument(argument: Argument) -> _C.KernelArgument:
    if isinstance(argument, Address):
        return _address(argument)
    if isinstance(argument, Int64):
        return "int64", argument.value
    if isinstance(argument, TensorMap):
        sizes = (argument.shape, argument.strides, argument.box)
        return (
            "tensor_map",
            _address(argument.address),
            argument.element,
            *sizes,
            argument.swizzle_bytes,
        )
    if isinstance(argument, float):
        return "float", argument
    if isinstance(argument, int) and not isinstance(argument, bool):
        if not -(2**31) <= argument < 2**31:
            raise ValueError(f"arguments: {argument} does not fit an int; Int64 is for larger ones")
        return "int32", argument
    raise TypeError(f"arguments: {argument!r} is no Address, int, Int64, float or TensorMap")
