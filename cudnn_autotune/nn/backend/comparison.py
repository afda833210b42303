"""Times programs that compute the same, taking turns, and compares their outputs.

A program that communicates with other processes must not be timed: all of them have to run it
equally often, or one waits for the others for ever.
"""

from __future__ import annotations

import math
import operator
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cudnn_autotune.nn.untouched import cuda_devices, generators_kept, seed_generators

Run = Callable[..., Any]

CUDA_GRAPH_TREES = "torch._inductor.cudagraph_trees"  # importing it takes seconds

_WARMUP_CALLS = 3  # Inductor records a CUDA graph at the second call, and replays it at the third.
_ROUNDS = 7
_BATCH_MS = 20.0
_MOST_CALLS = 200
_MOST_AHEAD_S = 0.5
# A GPU takes about a thousand launches ahead, and the host needs no less than this for so many.
_QUEUE_MS = 4.0
_CYCLES_PER_S = 2e9  # GPUs spin at about this clock

# The relative error (of the norm) that two correct programs may always have, by the dtype of the
# output, and the rounding step of the computation. Float32 is taken to be computed in TF32.
_TOLERANCES = {
    torch.float64: (1e-9, 2.0**-52),
    torch.float32: (1e-2, 2.0**-10),
    torch.float16: (2e-2, 2.0**-10),
    torch.bfloat16: (1e-1, 2.0**-7),
}

# A deep network amplifies rounding, and how much depends on its weights. So the noise of a program
# is measured: how far its output moves if its inputs change in their last place. Correct programs
# of 7 architectures were 0.5 to 0.9 times the noise apart (docs/reference/backend.md).
_NOISE_FACTOR = 2.0

# By so much less GPU time another program is kept for captures, beside the one for plain calls.
_LEAST_GAIN = 0.01

# A program that computes something else is about 1 away, however large the noise is.
_MOST_ALLOWED = 0.5


# Namespaces of operators that communicate with other processes, and of PyTorch's and this package's
# that do not.
_COMMUNICATING = {
    *("c10d", "_c10d_functional", "_c10d_functional_autograd"),
    *("c10d_functional", "_dtensor", "symm_mem"),
}
LOCAL = {
    *("aten", "cudnn_autotune", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn", "prim"),
    *("prims", "quantized", "quantized_decomposed", "rngprims", "torchvision"),
}


@dataclass(frozen=True)
class Comparison:
    """Measurements of programs, by their names."""

    times_ms: Mapping[str, float]
    """Milliseconds of a call, with the host's part, as of :func:`time_in_turns`."""
    gpu_times_ms: Mapping[str, float]
    """Milliseconds of the GPU's part of a call; empty if the inputs are not on a GPU."""
    wrong: Mapping[str, str]
    """Reason why a program fails, or its output is not that of the first one. It is not timed."""

    @property
    def fastest(self) -> str:
        """The program whose calls take the least time."""
        return min(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def fastest_in_captures(self) -> str:
        """The program whose calls take the GPU the least time, as in a CUDA graph, in which no host
        takes part. It is :attr:`fastest` unless another one takes 1 % less."""
        if not self.gpu_times_ms:
            return self.fastest
        least = min(self.gpu_times_ms, key=self.gpu_times_ms.__getitem__)
        gains = self.gpu_times_ms[least] < (1 - _LEAST_GAIN) * self.gpu_times_ms[self.fastest]
        return least if gains else self.fastest


def compare(
    programs: Mapping[str, Run],
    inputs: Sequence[Any],
    weights: Collection[int] = (),
    devices: Collection[int] = (),
) -> Comparison:
    """Runs programs in turns on the same inputs, which they must not change.

    The first program is the reference for the outputs; where it fails, so does this. The random
    number generators are afterwards what they were.

    Args:
        programs: what to call with ``*inputs``, by name.
        inputs: tensors (on one device) and other values.
        weights: positions of inputs that are weights. They are not changed where the noise of the
            outputs is measured (see :func:`difference`).
        devices: CUDA devices on which the programs compute, beside those of the inputs.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for all programs.
    """
    of_inputs = cuda_devices(inputs)
    on_gpu = bool(of_inputs)
    drawn_on = of_inputs.union(devices)
    reference = next(iter(programs))
    data = {i: value for i, value in enumerate(inputs) if i not in weights}

    def outputs(name: str, given: Sequence[Any] = inputs, seed: int = 0) -> list[Tensor]:
        seed_generators(drawn_on, seed)
        return _outputs(programs[name], given)

    def of_reference(data: Mapping[int, Any]) -> list[Tensor]:
        return outputs(reference, [data.get(i, value) for i, value in enumerate(inputs)])

    with generators_kept(drawn_on), torch.no_grad(), own_steps():
        expected, wrong = outputs(reference), {}
        for name in list(programs)[1:]:
            try:
                text = difference(expected, outputs(name), of_reference, data)
                if text is not None:
                    again = outputs(reference, seed=1)
                    if difference(expected, again, of_reference, data) is not None:
                        text = f"it may draw random numbers in another order: {text}"
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                text = f"it fails: {type(failure).__name__}: {failure}".partition("\n")[0]
            if text is not None:
                wrong[name] = text
        del expected
        right = {name: program for name, program in programs.items() if name not in wrong}
        times = time_in_turns(right, inputs, on_gpu)
        gpu_times = {}
        if on_gpu:
            gpu_times = time_in_turns(right, inputs, True, with_host=False, batch_ms=_QUEUE_MS)
    return Comparison(times, gpu_times, wrong)


def _outputs(program: Run, inputs: Sequence[Any]) -> list[Tensor]:
    """Copies of the tensors that a program returns.

    A copy outlives the replay of a CUDA graph that would overwrite the output.
    """
    begin_step()
    results = [leaf for leaf in tree_leaves(program(*inputs)) if isinstance(leaf, Tensor)]
    return [result.detach().clone() for result in results]


def difference(
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    reference: Callable[[Any], Sequence[Tensor]],
    inputs: Any,
) -> str | None:
    """Says how outputs differ by more than rounding explains; None if they do not.

    What rounding explains is the tolerance of the output's dtype and twice the noise, at most 0.5.
    The noise is the relative distance by which the reference's output moves when its inputs change
    in their last place. It is measured only if the tolerance alone does not suffice.

    Only floating-point outputs are compared by value: an index of the largest of equal values may
    be another one.

    Args:
        expected: what the reference returned.
        actual: what the other program returned.
        reference: returns the reference's outputs, which it must not reuse, for other inputs. It
            is called once at most.
        inputs: those of the reference, in any nest of containers of ``torch.utils._pytree``. They
            are not changed. Without floating-point tensors among them, as for a model of token ids,
            the noise is 0.
    """
    if (text := _mismatch(expected, actual)) is not None:
        return text
    noises: list[float] | None = None
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.dtype not in _TOLERANCES:
            continue
        if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
            return f"output {index} is not finite in other places"
        tolerance, _ = _TOLERANCES[one.dtype]
        error = _relative_error(one, other)
        if error <= tolerance:
            continue
        if noises is None:
            noises = _noises(expected, reference, inputs)
        allowed = min(tolerance + _NOISE_FACTOR * noises[index], _MOST_ALLOWED)
        if error > allowed:
            return (
                f"output {index} has a relative error of {error:.2g}, allowed is {allowed:.2g} "
                f"(noise {noises[index]:.2g})"
            )
    return None


def _mismatch(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """Says how outputs differ in number, shape or dtype; None if they do not."""
    if len(expected) != len(actual):
        return f"it has {len(actual)} outputs, expected {len(expected)}"
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"output {index} is {tuple(other.shape)} of {other.dtype}, expected "
                f"{tuple(one.shape)} of {one.dtype}"
            )
    return None


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the norm of the difference over that of ``expected``, of what is finite in both."""
    finite = torch.isfinite(expected) & torch.isfinite(actual)
    a, b = (torch.where(finite, tensor, 0).double() for tensor in (expected, actual))
    return (torch.dist(a, b) / a.norm().clamp_min(1e-30)).item()


def _noises(
    expected: Sequence[Tensor], reference: Callable[[Any], Sequence[Tensor]], inputs: Any
) -> list[float]:
    """Returns how far each output moves if the inputs change in their last place."""
    # Under autocast outputs are less precise than inputs, and so is what is computed of the inputs.
    steps = [_TOLERANCES[one.dtype][1] for one in expected if one.dtype in _TOLERANCES]
    moved = reference(tree_map(lambda value: _perturbed(value, max(steps)), inputs))
    if _mismatch(expected, moved) is not None:  # sizes may depend on the data
        return [0.0] * len(expected)
    return [_relative_error(*pair) for pair in zip(expected, moved, strict=True)]


@torch.no_grad()
def _perturbed(value: Any, least_step: float) -> Any:
    """Returns a copy of a floating-point tensor with each element times 1 + step or 1 - step, at
    random, in the same layout; any other value itself."""
    is_plain = type(value) is Tensor and value.layout == torch.strided
    if not is_plain or value.dtype not in _TOLERANCES or value.numel() == 0:
        return value
    step = max(_TOLERANCES[value.dtype][1], least_step)
    # Compiled programs rely on the strides. A clone of a slice or expanded tensor has others.
    dimensions = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in dimensions)
    memory = value.as_strided((span,), (1,), value.storage_offset())
    generator = torch.Generator(value.device).manual_seed(0)
    grows = torch.rand(span, generator=generator, device=value.device) < 0.5
    changed = torch.where(grows, memory * (1 + step), memory * (1 - step))
    changed = torch.where(changed.isfinite(), changed, memory)  # the largest number of the dtype
    return changed.as_strided(value.shape, value.stride(), 0)


def time_in_turns(
    programs: Mapping[str, Run],
    inputs: Sequence[Any],
    on_gpu: bool,
    *,
    with_host: bool = True,
    batch_ms: float = _BATCH_MS,
    rounds: int = _ROUNDS,
    warmup_calls: int = _WARMUP_CALLS,
) -> dict[str, float]:
    """Returns the time of a call of each program, in milliseconds, after some calls of each.

    It is the median of the first program, and of another one that times the median of their ratios
    in one round: the clock may drift from round to round by more than the programs differ.

    Args:
        with_host: whether what the host takes counts where the GPU waits for it. Else the GPU gets
            most of a call's work before it begins with it.
        batch_ms: about so long a program runs in its turn, in one call at least.
        rounds: how many turns each program has.
        warmup_calls: how many calls of each come before; none where all of them have just run.
    """
    calls, ahead_s = {}, dict.fromkeys(programs, 0.0)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    with own_steps():
        for name, program in programs.items():
            for _ in range(warmup_calls):
                _batch_ms(program, inputs, 1, on_gpu)
            once = max(_batch_ms(program, inputs, 1, on_gpu), 1e-3)
            calls[name] = max(1, min(math.ceil(batch_ms / once), _MOST_CALLS))
            if on_gpu and not with_host:
                ahead_s[name] = min(1e-3 * once * calls[name], _MOST_AHEAD_S)
        for round in range(rounds):
            names = list(programs)
            for name in names if round % 2 else reversed(names):
                batch = _batch_ms(programs[name], inputs, calls[name], on_gpu, ahead_s[name])
                samples[name].append(batch / calls[name])
    return paired(samples)


def paired(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the times of :func:`time_in_turns`, of samples by round."""
    first = next(iter(samples.values()), ())
    return {
        name: statistics.median(first) * statistics.median(map(operator.truediv, values, first))
        for name, values in samples.items()
    }


def _batch_ms(
    program: Run, inputs: Sequence[Any], calls: int, on_gpu: bool, ahead_s: float = 0.0
) -> float:
    """Returns the time of some calls one after another, with what the host adds to it.

    Args:
        ahead_s: so long the GPU is kept busy first, and the host gets ahead; that does not count.
    """
    if on_gpu:
        torch.cuda.synchronize()
    if ahead_s:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(_CYCLES_PER_S * ahead_s))
        begin.record()
        for _ in range(calls):
            begin_step()
            program(*inputs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    start = time.perf_counter()
    for _ in range(calls):
        begin_step()
        program(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


class _TimedConvolutions(TorchDispatchMode):
    """Records the GPU's time in ATen's convolutions, in events before and behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.convolution.default:
            return func(*args, **(kwargs or {}))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = func(*args, **(kwargs or {}))
        end.record()
        self.events.append((start, end))
        return result


def convolutions_ms(run: Run, inputs: Sequence[Any]) -> float:
    """Returns the milliseconds that the current GPU spends in the convolutions of a call that no
    compiler has made; 0 where the host is too slow to tell."""
    timed = _TimedConvolutions()
    devices = {torch.cuda.current_device(), *cuda_devices(inputs)}
    with generators_kept(devices), torch.no_grad(), own_steps(), timed:
        run(*inputs)  # chooses PyTorch's algorithms
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        run(*inputs)
        host_s = time.perf_counter() - begin_s
        if host_s > _MOST_AHEAD_S:
            return 0.0
        timed.events.clear()
        # The GPU waits until the host is ahead of it, so that it does not wait between kernels.
        torch.cuda._sleep(int(2 * host_s * _CYCLES_PER_S))
        run(*inputs)
        torch.cuda.synchronize()
    return sum(start.elapsed_time(end) for start, end in timed.events)


def begin_step() -> None:
    """Lets Inductor's CUDA graphs, if there are any, overwrite the outputs of the last call."""
    if CUDA_GRAPH_TREES in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def own_steps() -> Iterator[None]:
    """Takes back that steps were marked as begun. After the first mark Inductor's CUDA graphs begin
    no step of their own accord any more: a program without marks would be recorded at each call."""
    trees = sys.modules.get(CUDA_GRAPH_TREES)
    before = trees.MarkStepBox.mark_step_counter if trees is not None else 0
    try:
        yield
    finally:
        if CUDA_GRAPH_TREES in sys.modules:
            sys.modules[CUDA_GRAPH_TREES].MarkStepBox.mark_step_counter = before


def cuda_devices_of(graph: GraphModule, inputs: Sequence[Any]) -> set[int]:
    """Returns the indices of the CUDA devices that the values of a graph of Dynamo are on."""
    results = (node.meta.get("example_value") for node in all_nodes(graph))
    return cuda_devices([*inputs, *tree_leaves([*results])])


def is_among_ranks() -> bool:
    """Returns whether this process has a process group of torch.distributed with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_nodes(graph: GraphModule) -> list[Node]:
    """Returns the nodes of a graph and of those that are nested in it."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
    return [node for one in graphs for node in one.nodes]


def namespaces_of(graph: GraphModule) -> set[str]:
    """Returns the namespaces of the operators of a graph, and of those that are nested in it."""
    # An operator with an effect is an argument of `with_effects`.
    targets = [target for node in all_nodes(graph) for target in (node.target, *node.args)]
    packets = (
        target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        for target in targets
    )
    return {
        packet._qualified_op_name.partition("::")[0]
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
    }


def communicates(graph: GraphModule) -> bool:
    """Returns whether a graph of operators, or one that is nested in it, has a collective
    operation.

    Among ranks, an operator that is neither PyTorch's nor this package's counts as one, because
    nobody knows what it does.
    """
    namespaces = namespaces_of(graph)
    if is_among_ranks() and namespaces - LOCAL:
        return True
    return bool(namespaces & _COMMUNICATING)


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collects the names of the collective operations that run in the ``with`` block."""
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace in _COMMUNICATING:
                seen.add(func._schema.name.replace("::", "."))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield seen
