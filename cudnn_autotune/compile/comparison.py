"""The comparison of a graph's programs: their outputs, then their times in turns."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cudnn_autotune.compile.communication import all_nodes
from cudnn_autotune.compile.compilation import EAGER
from cudnn_autotune.nn.untouched import cuda_devices, generators_kept, seed_generators
from cudnn_autotune.store import settings
from cudnn_autotune.store.verdicts import LockedError
from cudnn_autotune.timers.programs import (
    MOST_AHEAD_S,
    QUEUE_MS,
    Run,
    begin_step,
    own_steps,
    time_in_turns,
)
from cudnn_autotune.timers.stopwatch import Stopwatch, occupy
from cudnn_autotune.tuning.outputs import difference

# The relative gain in GPU time from which a second program is kept for captures.
_LEAST_GAIN = 0.01


# The gradient of a loss in float16, if no other one overflows by it: GradScaler's first one.
_LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class Comparison:
    """Measurements of programs, by their names."""

    times_ms: Mapping[str, float]
    """Milliseconds of a call, with the host's part, as of :func:`time_in_turns`."""
    gpu_times_ms: Mapping[str, float]
    """Milliseconds of the GPU's part of a call; empty if the inputs are not on a GPU."""
    wrong: Mapping[str, str] = field(default_factory=dict)
    """Reason why a program fails, or its output differs from the first one's. It is not timed."""
    is_kept: bool = False
    """Whether the times are an earlier process's."""

    @property
    def fastest(self) -> str:
        """The program whose calls take the least time."""
        return min(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def fastest_in_captures(self) -> str:
        """The program with the least GPU time, for CUDA graphs, in which no host takes part. It is
        :attr:`fastest` unless another one takes 1 % less."""
        if not self.gpu_times_ms:
            return self.fastest
        least = min(self.gpu_times_ms, key=self.gpu_times_ms.__getitem__)
        gains = self.gpu_times_ms[least] < (1 - _LEAST_GAIN) * self.gpu_times_ms[self.fastest]
        return least if gains else self.fastest

    def decides_for(self, program: str) -> bool:
        """Returns whether a program is the fastest, in calls and in captures."""
        return program == self.fastest == self.fastest_in_captures

    def serves(self, programs: Collection[str], on_gpu: bool) -> bool:
        """Returns whether it decides between programs, by their names: it has the times of exactly
        these, or they are its fastest one and PyTorch's, which gives the outputs."""
        if self.gpu_times_ms.keys() != (self.times_ms.keys() if on_gpu else set()):
            return False
        names = set(programs)
        has_outputs_alone = names == {EAGER, self.fastest} and self.decides_for(self.fastest)
        return has_outputs_alone or names == self.times_ms.keys()


def compare(
    programs: Mapping[str, Run],
    inputs: Sequence[Any],
    weights: Collection[int] = (),
    devices: Collection[int] = (),
    kept: Comparison | None = None,
    for_training: bool = False,
    dtypes: Collection[torch.dtype] = (),
) -> Comparison:
    """Runs programs in turns on the same inputs, which they must not change.

    The first program is the reference for the outputs; its failure is raised. The random number
    generators are restored afterwards.

    In training a program is run forward and backward. The gradients of its outputs are random
    numbers, and those of its inputs are compared too. In float16 a loss is scaled: small gradients
    would be rounded to zero.

    Args:
        programs: the callables for ``*inputs``, by name.
        inputs: tensors (on one device) and other values.
        weights: positions of weights among the inputs. The measurement of the outputs' noise does
            not change them (see :func:`difference`), unless a graph in training has only such as
            token ids besides.
        devices: CUDA devices on which the programs compute, beside the inputs' devices.
        kept: the comparison of an earlier process. If it decides between these programs, and all
            are right now, there is no timing.
        for_training: whether a backward belongs to a call.
        dtypes: dtypes in which the programs compute, beside those of inputs and outputs.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for all programs.
        LockedError: there would be timing, and the store is locked.
    """
    of_inputs = cuda_devices(inputs)
    on_gpu = bool(of_inputs)
    drawn_on = of_inputs.union(devices)
    reference = next(iter(programs))
    gradients, losses = 0, []
    if for_training:
        if not any(_is_real(value) for i, value in enumerate(inputs) if i not in weights):
            weights = ()
        with generators_kept(drawn_on):
            seed_generators(drawn_on, 0)
            drawn = _gradients_for(programs[reference], inputs)
        if torch.float16 in dtypes:
            losses = [one.fill_(_LOSS_SCALE) for one in drawn if one.numel() == 1]
        gradients = sum(isinstance(one, Tensor) and one.requires_grad for one in inputs)
        programs = {name: step(program, len(inputs)) for name, program in programs.items()}
        inputs = [*inputs, *drawn]
    data = {i: value for i, value in enumerate(inputs) if i not in weights}

    def outputs(name: str, given: Sequence[Any] = inputs, seed: int = 0) -> list[Tensor]:
        seed_generators(drawn_on, seed)
        return _outputs(programs[name], given)

    def of_reference(data: Mapping[int, Any]) -> list[Tensor]:
        return outputs(reference, [data.get(i, value) for i, value in enumerate(inputs)])

    def fault(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
        return difference(expected, found, of_reference, data, gradients, dtypes)

    with generators_kept(drawn_on), torch.no_grad(), own_steps():
        expected, wrong = outputs(reference), {}
        if losses and not all(bool(one.isfinite().all()) for one in expected[-gradients:]):
            for one in losses:
                one.fill_(1)
            expected = outputs(reference)
        for name in list(programs)[1:]:
            try:
                text = fault(expected, outputs(name))
                if text is not None and fault(expected, outputs(reference, seed=1)) is not None:
                    text = f"it may draw random numbers in another order: {text}"
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                text = f"it fails: {type(failure).__name__}: {failure}".partition("\n")[0]
            if text is not None:
                wrong[name] = text
        del expected
        if kept is not None and not wrong and kept.serves(programs, on_gpu):
            return replace(kept, is_kept=True)
        if settings.is_locked():
            raise LockedError(", ".join(programs))
        right = {name: program for name, program in programs.items() if name not in wrong}
        times = time_in_turns(right, inputs, on_gpu)
        gpu_times = {}
        if on_gpu:
            gpu_times = time_in_turns(right, inputs, True, with_host=False, batch_ms=QUEUE_MS)
    return Comparison(times, gpu_times, wrong)


def step(program: Run, inputs: int) -> Run:
    """Returns a function that runs a program forward and backward. It returns the outputs, then the
    gradients of the inputs.

    Neither gradients of the caller's tensors nor their hooks take part.

    Args:
        inputs: number of the program's inputs. Behind them the function gets the gradients of the
            outputs that require one; ones if it gets no more.
    """

    def run(*values: Any) -> list[Tensor]:
        with torch.enable_grad():
            given = _own(values[:inputs])
            outputs = _tensors(program(*given))
            starts = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
            ends = [output for output in outputs if output.requires_grad]
            of_ends = values[inputs:] or [torch.ones_like(end) for end in ends]
            found = torch.autograd.grad(ends, starts, of_ends, materialize_grads=True)
        return [*(output.detach() for output in outputs), *found]

    return run


def _own(inputs: Sequence[Any]) -> list[Any]:
    """Returns inputs outside of the caller's autograd graph, in the same memory."""
    return [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in inputs
    ]


def _gradients_for(program: Run, inputs: Sequence[Any]) -> list[Tensor]:
    """Returns a gradient for each output of a program that requires one: normal random numbers in
    the output's shape, strides and dtype."""
    with torch.enable_grad(), own_steps():
        ends = [output for output in _run(program, _own(inputs)) if output.requires_grad]
    drawn = []
    for seed, end in enumerate(ends):
        generator = torch.Generator(end.device).manual_seed(seed)
        # There is no generator of eight bits.
        dtype = torch.float32 if end.dtype.itemsize == 1 else end.dtype
        numbers = torch.empty_like(end, dtype=dtype, requires_grad=False)
        drawn.append(numbers.normal_(generator=generator).to(end.dtype))
    return drawn


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def _run(program: Run, inputs: Sequence[Any]) -> list[Tensor]:
    """Returns the output tensors of a program's own step."""
    begin_step()
    return _tensors(program(*inputs))


def _outputs(program: Run, inputs: Sequence[Any]) -> list[Tensor]:
    """Returns copies of a program's output tensors.

    A copy outlives the replay of a CUDA graph that would overwrite the output.
    """
    return [result.detach().clone() for result in _run(program, inputs)]


_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


class _TimedConvolutions(TorchDispatchMode):
    """A mode that records the GPU's time in ATen's convolutions and their backwards, by a stopwatch
    for each. Those that the GPU begins before the host has launched them do not count: it waits for
    the host within them."""

    def __init__(self) -> None:
        super().__init__()
        self.watches: list[Stopwatch] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _CONVOLUTIONS:
            return func(*args, **(kwargs or {}))
        with Stopwatch() as watch:
            result = func(*args, **(kwargs or {}))
        if not watch.has_begun():
            self.watches.append(watch)
        return result


def convolutions_ms(run: Run, inputs: Sequence[Any]) -> float:
    """Returns the milliseconds of the current GPU in the convolutions of a call without a compiler,
    and in their backwards if the call has them. It is less where the host is too slow."""
    timed = _TimedConvolutions()
    devices = {torch.cuda.current_device(), *cuda_devices(inputs)}
    with generators_kept(devices), torch.no_grad(), own_steps(), timed:
        run(*inputs)  # chooses PyTorch's algorithms
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        run(*inputs)
        host_s = time.perf_counter() - begin_s
        if host_s > MOST_AHEAD_S:
            return 0.0
        timed.watches.clear()
        # The GPU spins until the host is ahead of it, so that it does not wait between kernels.
        occupy(2 * host_s)
        run(*inputs)
        torch.cuda.synchronize()
    return sum(watch.ms() for watch in timed.watches)


def dtypes_of(graph: GraphModule) -> set[torch.dtype]:
    """Returns the dtypes of the tensors of a graph of Dynamo."""
    results = tree_leaves([node.meta.get("example_value") for node in all_nodes(graph)])
    return {value.dtype for value in results if isinstance(value, Tensor)}


def cuda_devices_of(graph: GraphModule, inputs: Sequence[Any]) -> set[int]:
    """Returns the indices of the CUDA devices of the values of a graph of Dynamo."""
    results = (node.meta.get("example_value") for node in all_nodes(graph))
    return cuda_devices([*inputs, *tree_leaves([*results])])
