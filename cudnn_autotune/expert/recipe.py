"""The kernels and engines that an implementation of your own launches: see
:func:`cudnn_autotune.register_implementation`."""

from cudnn_autotune.engines.recipe import (
    Address,
    CompiledKernel,
    EngineLaunch,
    Int64,
    Kernel,
    KernelLaunch,
    PythonLaunch,
    Recipe,
    TensorMap,
    workspace_room,
)

__all__ = [
    "Address",
    "CompiledKernel",
    "EngineLaunch",
    "Int64",
    "Kernel",
    "KernelLaunch",
    "PythonLaunch",
    "Recipe",
    "TensorMap",
    "workspace_room",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
