"""The conditions of a computation's time as text: of a graph, or of calls.

A measurement holds for an equal text. Conditions that cannot be described have no text, and their
computation is measured in each process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cudnn_autotune import sampling
from cudnn_autotune.compile.communication import all_nodes, nested_graphs
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.core.versions import version
from cudnn_autotune.norms.choices import norm_choices
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.tuning import pins, settings
from cudnn_autotune.tuning.choice_log import are_settled

# The function of PyTorch that calls compiled code, in the file of this name.
_CALLS_COMPILED = ("compile_wrapper", "eval_frame.py")
# The packages of functions whose names say what they compute. A user may allow others in a graph.
_KNOWN_PACKAGES = {"torch", "_operator", "builtins", "math"}
_WRITTEN_OUT = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.layout, torch.memory_format, torch.Size),
)


def text_of(value: Any) -> str:
    """Returns a value as text, a tensor without its numbers. Equal values have equal texts in all
    processes. Objects of other kinds are described by their class."""
    if isinstance(value, Tensor):
        kind = ""
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            kind = f" {type(value).__qualname__} {text_of((parts, context))}"
        steps = tuple(value.stride()) if value.layout == torch.strided else value.layout
        facts = (value.dtype, tuple(value.shape), steps, value.device.type, value.requires_grad)
        return f"<{' '.join(map(str, facts))}{kind}>"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {text_of(one)}' for key, one in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, slice):
        return f"slice{text_of((value.start, value.stop, value.step))}"
    if isinstance(value, _WRITTEN_OUT):
        return repr(value)
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    # Pooling functions of torch.nn.functional differ by their __name__ alone.
    return f"{named.__module__}.{named.__qualname__} {named.__name__}"


def of_graph(graph: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Returns the text of a graph of Dynamo and of its nested graphs, without names of values; None
    if sizes are dynamic, or the graph does not say what it computes."""
    nodes = all_nodes(graph)
    has_policy = any("_checkpoint_context_fn" in one.meta for one in nested_graphs(graph))
    if has_policy or not all(map(_is_described, nodes)):
        return None
    values = [*inputs, *(node.meta.get("example_value") for node in nodes)]
    if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(values)):
        return None
    names = {node: f"%{i}" for i, node in enumerate(nodes)}

    def operand(value: Any) -> Any:
        return names[value] if isinstance(value, Node) else text_of(value)

    lines = [*map(text_of, inputs)]
    for node in nodes:
        target = "" if node.op in ("placeholder", "output") else text_of(node.target)
        operands = map_aggregate((node.args, dict(node.kwargs)), operand)
        value = text_of(node.meta.get("example_value"))
        lines.append(f"{names[node]} {node.op} {target} {operands} {value}")
    return "\n".join(lines)


def _is_described(node: Node) -> bool:
    """Returns whether the text of a node says what it computes. That of a user's function does not,
    nor that of a Triton kernel, which has its place in a table of Dynamo."""
    target: Any = node.target
    if node.op != "call_function":
        return True
    package = (getattr(target, "__module__", None) or "builtins").partition(".")[0]
    return package in _KNOWN_PACKAGES and "triton_kernel" not in str(target)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yields a list that has one text at the end: the operators that run in the ``with`` block,
    with their operands. It stays empty if Dynamo has compiled some of the code: that runs
    uncompiled here, and its compilation is unknown."""
    found: list[str] = []
    digest, is_compiled = hashlib.sha256(), False

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal is_compiled
            is_compiled = is_compiled or _is_in_compiled()
            digest.update(f"{text_of(func)} {text_of(args)} {text_of(kwargs or {})}\n".encode())
            return func(*args, **(kwargs or {}))

    with Record():
        yield found
    if not is_compiled:
        found.append(digest.hexdigest())


def _is_in_compiled() -> bool:
    """Returns whether Dynamo has compiled a function on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (code.co_name, os.path.basename(code.co_filename)) == _CALLS_COMPILED:
            return True
        frame = frame.f_back
    return False


def modes_of(graph: GraphModule) -> set[str | None]:
    """Returns the sampling modes that the layers of a graph of Dynamo name; None: the settings'."""
    ours = torch.ops.cudnn_autotune
    targets = [t for mark in (ours.mark_input, ours.mark_padded) for t in (mark, mark.default)]
    marks = [node for node in all_nodes(graph) if node.target in targets]
    return {node.args[-2] or None for node in marks}  # type: ignore[misc]


def is_kept(modes: Iterable[str | None]) -> bool:
    """Returns whether a measurement can be kept for the next process, or was: the store is used,
    and no mode leaves the choice of engines to later calls.

    Args:
        modes: the sampling modes of the convolutions; None stands for the settings'.
    """
    policy = _process_wide()
    every = {*modes, None, None if policy is None else policy.sampling}
    named = {mode or settings.get_sampling() for mode in every}
    return store_settings.is_used() and not any(
        sampling.traits(settings.registered_mode(mode)).decides_later for mode in named
    )


def _process_wide() -> _C.ProcessWidePolicy | None:
    """Returns the policy of ``enable()``; None without one."""
    return _C.process_wide() if extension_available() else None


def is_settled() -> bool:
    """Returns whether no choice of this process may be another one later."""
    return are_settled() and not any(choice.is_provisional for choice in norm_choices())


def conditions(device_type: str) -> str:
    """Returns the conditions of any computation's time in this process: versions and settings, and
    on a CPU the machine. The GPU, cuDNN, torch and implementations are not among them."""
    # Every computation of norms needs the kernels.
    with IMPORTING:
        from cudnn_autotune.norms import plan

    policy = _process_wide()
    facts = {
        "versions": (version(), torch.version.cuda, _triton_version(), plan.VERSION),
        "policies": (
            *(settings.get_sampling(), settings.get_workspace_limit()),
            *(settings.get_benchmark_limit(), settings.get_budget_ms()),
            None if policy is None else (policy.sampling, policy.workspace_limit),
            {problem.text: engine for problem, engine in pins.pins().items()},
        ),
        "torch": (
            *(torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark()),
            *(torch._C._get_cudnn_deterministic(), torch.are_deterministic_algorithms_enabled()),
            *(
                torch._C._get_fp32_precision_getter(backend, op)
                for backend in ("cuda", "mkldnn")
                for op in ("conv", "matmul")
            ),
            torch._C._get_mkldnn_enabled(),
            *(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
        ),
        "machine": (platform.node(), torch.get_num_threads()) if device_type == "cpu" else None,
    }
    return text_of(facts)


def of_inductor(options: Mapping[str, Any]) -> str | None:
    """Returns the configuration of Inductor and AOTAutograd for a graph; None if it has passes of
    the user's.

    Args:
        options: the caller's changes.
    """
    import torch._functorch.config as of_autograd
    from torch._inductor import config

    every = {**config.get_config_copy(), **options}
    if any(value for name, value in every.items() if name.endswith("_pass")):
        return None
    of_config = {**config.save_config_portable(), **options}
    return text_of((of_config, of_autograd.save_config_portable()))


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
