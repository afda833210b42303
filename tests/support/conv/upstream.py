"""PyTorch's own sample inputs and error inputs for its convolutions, from the torch wheel.

``torch.testing._internal`` needs the package expecttest, which is in the ``test`` extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import cudnn_autotune as ca
from support.conv.references import assert_close, error_of, tolerance

FUNCTIONS = [f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)]
MODULES = [
    f"{lazy}Conv{kind}{dims}d"
    for kind in ("", "Transpose")
    for dims in (1, 2, 3)
    for lazy in ("", "Lazy")
]
# PyTorch lists no error inputs for the transposed ones; tests/cpu/nn/test_module_parity.py has
# some.
WITH_ERRORS = [name for name in FUNCTIONS if "transpose" not in name]
OPS = {op.name.removeprefix("nn.functional."): op for op in op_db}


def op_samples(
    name: str, device: str, dtype: torch.dtype
) -> Iterator[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
    """(input, (weight, bias, ...), keywords) of each sample of a function."""
    count = 0
    for sample in OPS[name].sample_inputs(device, dtype, requires_grad=dtype.is_floating_point):
        count += 1
        yield sample.input, sample.args, sample.kwargs
    assert count >= 8, "PyTorch's list has all but vanished"


def compare(ours: Tensor, theirs: Tensor, exact: bool, what: str) -> None:
    """Equal to the bit, or both within the dtype's tolerance of the truth."""
    if exact:
        assert torch.equal(ours, theirs), what
    elif theirs.is_complex():
        # The same kernels of PyTorch's; on a GPU they may add in another order.
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), what
    else:
        assert_close(ours, theirs, 2 * tolerance(theirs.dtype), what)


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    seed = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(output, inputs, seed.to(output.device, output.dtype))


def check_op_samples(
    name: str, device: str, dtype: torch.dtype, exact: bool, enabled: bool = False
) -> None:
    """Outputs, strides and gradients of every sample against torch.nn.functional's; those of
    cudnn_autotune.functional, or of torch.nn.functional under ``enable()``."""
    for input, args, kwargs in op_samples(name, device, dtype):
        wanted = [t for t in (input, *args) if isinstance(t, Tensor) and t.requires_grad]

        def compute(
            module: Any,
            input: Tensor = input,
            args: Any = args,
            kwargs: Any = kwargs,
            wanted: list[Tensor] = wanted,
        ) -> list[Tensor]:
            output = getattr(module, name)(input, *args, **kwargs)
            return [output, *(gradients(output, wanted) if wanted else ())]

        expected = compute(torch.nn.functional)
        with ca.enable() if enabled else nullcontext():
            actual = compute(torch.nn.functional if enabled else ca.functional)
        for ours, theirs in zip(actual, expected, strict=True):
            compare(ours, theirs, exact, f"{tuple(input.shape)} {kwargs}")
        assert actual[0].stride() == expected[0].stride()


def check_op_errors(name: str, device: str, enabled: bool = False) -> None:
    """Every error input raises what torch.nn.functional raises, word for word: by
    cudnn_autotune.functional, or by torch.nn.functional under ``enable()``."""
    count = 0
    for error_input in OPS[name].error_inputs(device):
        sample = error_input.sample_input
        given = (sample.input, *sample.args)
        expected = error_of(getattr(torch.nn.functional, name), *given, **sample.kwargs)
        module = torch.nn.functional if enabled else ca.functional
        with ca.enable() if enabled else nullcontext():
            found = error_of(getattr(module, name), *given, **sample.kwargs)
        assert issubclass(expected[0], error_input.error_type)
        assert re.search(error_input.error_regex, expected[1])
        assert found == expected
        count += 1
    assert count >= 8


def check_module(name: str, device: str, dtype: torch.dtype, training: bool, exact: bool) -> None:
    """A module of module_db: outputs, parameter gradients, state_dict."""
    (info,) = (info for info in module_db if info.name == f"nn.{name}")
    count = 0
    for sample in info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=training
    ):
        made = sample.constructor_input
        modules: list[nn.Module] = [
            cls(*made.args, device=device, dtype=dtype, **made.kwargs).train(training)
            for cls in (info.module_cls, getattr(ca, name))
        ]
        theirs, ours = modules
        (input,) = sample.forward_input.args
        expected = theirs(input)  # a lazy module has its parameters from here on
        ours.load_state_dict(theirs.state_dict())
        actual = ours(input)
        pairs = [(actual, expected)]
        pairs += zip(
            gradients(actual, [input, *ours.parameters()]),
            gradients(expected, [input, *theirs.parameters()]),
            strict=True,
        )
        for mine, other in pairs:
            compare(mine, other, exact, f"{made.args} {made.kwargs} {sample.desc}")
        count += 1
    assert count >= 2
