"""The compiled extension, documented in csrc/. A build without CUDA lacks everything below
"search"."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

built_with_torch: str
built_with_cuda: str

# settings

class Settings:
    @property
    def sampling(self) -> str: ...
    @property
    def workspace_limit(self) -> int: ...
    @property
    def benchmark_limit(self) -> int: ...

def settings() -> Settings: ...
def set_sampling(name: str) -> None: ...
def set_workspace_limit(limit: int) -> None: ...
def set_benchmark_limit(limit: int) -> None: ...
def register_sampling(name: str) -> None: ...
def benchmark_limit_of_call() -> int:
    """The benchmark limit in the key of a call on this thread: a probe's number, or the setting."""

class Probe:
    """A context manager that marks this thread's calls, and the backward begun in it, as a probe's.

    Raises ValueError unless ``number`` is below 0.
    """

    def __init__(self, number: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def calls(self) -> dict[bytes, int]:
        """Number of its calls of each problem, by ``problem_key`` of the problem."""

def fallbacks() -> dict[str, int]: ...
def count_fallback(reason: str) -> None: ...
def clear_fallbacks() -> None: ...

# The fast entries of the convolutions (csrc/bind/bindings.h). They take the arguments of
# torch.nn.functional, then sampling and workspace_limit, by position. They return NotImplemented
# for arguments that they do not take.

conv1d: Callable[..., Tensor]
conv2d: Callable[..., Tensor]
conv3d: Callable[..., Tensor]
conv_transpose1d: Callable[..., Tensor]
conv_transpose2d: Callable[..., Tensor]
conv_transpose3d: Callable[..., Tensor]

# batch norms

def batch_norm(
    module: Module, input: Any, activation: str, tail: tuple[Module, ...], takes_all: bool
) -> Any:
    """Returns the output of a batch norm and the modules of ``tail`` behind it, in training by the
    choice for such calls. Returns None if the module's class has to compute the call
    (csrc/bind/bindings.h)."""

def group_norm(
    module: Module,
    input: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    casts: bool,
) -> Any:
    """Returns the output of a group norm in channels_last, the layout of its input. Returns
    NotImplemented where PyTorch computes it, and None for another layout
    (csrc/bind/bindings.h)."""

def set_norm_device(name: str) -> None:
    """Sets the type of device whose norms the operators may compute: "cuda", or in tests "cpu"."""

# search

class PlanError(RuntimeError): ...
class CudnnError(PlanError): ...

def cudnn_runtime_version() -> int: ...
def cudnn_frontend_version() -> str: ...

# the policy of a call

def enter_policy(sampling: str | None, workspace_limit: int | None) -> bool:
    """Serves this thread's convolutions until ``leave_policy``; False: the arguments are not taken,
    and the policy is not in force. Raises ValueError for an unknown mode."""

def leave_policy() -> None: ...
def policy_of_call(input: Tensor) -> tuple[str, int] | None:
    """Returns the arguments of the service of a convolution of this input on this thread now."""

class OwnPath:
    """A context manager in which ATen's convolutions and norms on this thread are PyTorch's."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class ProcessWidePolicy:
    """The arguments of calls that PyTorch's own functions make; "" and -1 are the settings'."""

    def __init__(self, sampling: str, workspace_limit: int) -> None: ...
    @property
    def sampling(self) -> str: ...
    @property
    def workspace_limit(self) -> int: ...

class AtenKernels:
    """Kernels of ``aten::convolution`` and its backward that read the policy, registered for a
    backend during the object's life."""

    def __init__(self, backend: str) -> None: ...

def serve_process_wide(backend: str) -> None:
    """Registers the kernels for good."""

def process_wide() -> ProcessWidePolicy | None:
    """Returns the policy of all threads; None if PyTorch's kernels serve its functions."""

def exchange_process_wide(policy: ProcessWidePolicy | None) -> ProcessWidePolicy | None:
    """Sets the policy of all threads, or None for PyTorch's kernels; returns the one before."""

class ConvProblem:
    def __init__(
        self,
        *,
        op: str,
        input_shape: Sequence[int],
        weight_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        dtype: str,
        memory_format: str,
        deterministic: bool,
        allow_tf32: bool,
        allow_reduced_precision: bool,
        depthwise_kernel: str,
        alignment: tuple[int, int, int],
        bias: bool = False,
        residual: bool = False,
        activation: str = "",
        pixel_strides: tuple[int, int] | None = None,
    ) -> None: ...
    def fields(self) -> dict[str, Any]:
        """The constructor's arguments by name."""

    @property
    def text(self) -> str: ...

def depthwise_kernel() -> str:
    """Returns ``torch.backends.cudnn.depthwise_kernel``, or "auto" in a torch without it."""

def problem_key(problem: ConvProblem) -> bytes: ...

class Candidate:
    @property
    def engine(self) -> int: ...
    @property
    def knobs(self) -> dict[str, int]: ...
    @property
    def text(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def numerical_notes(self) -> list[str]: ...
    @property
    def behavior_notes(self) -> list[str]: ...
    @property
    def heuristic_mode(self) -> str: ...
    @property
    def compute_capability(self) -> int: ...

def is_allowed(candidate: Candidate, problem: ConvProblem, workspace_limit: int) -> bool: ...
def is_known_wrong(
    engine_text: str, problem: ConvProblem, cudnn_version: int, compute_capability: int = 0
) -> bool: ...

class Plan:
    """A built candidate (csrc/plan/plan.h). Two threads may not use one at once."""

    @property
    def text(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def is_read_back(self) -> bool:
        """Whether it was read from a kept plan, without a compilation."""

def is_engine(text: str) -> bool:
    """Returns whether a candidate's text is an engine of cuDNN, which may not exist."""

def build_plan(problem: ConvProblem, text: str, device: int) -> Plan:
    """Builds the plan of a candidate's text. Raises PlanError if it does not build."""

PlanBuilder = Callable[[ConvProblem, str, int], Plan]
"""(problem, text, device) -> the plan of a candidate that is no engine, "aten" or "matmul". Called
on any thread. Its errors become a PlanError, except KeyboardInterrupt and the like."""

def set_plan_builder(builder: PlanBuilder) -> None: ...

Address = tuple[str, int]
"""A place in a buffer ("x", "w", "y", "bias", "residual" or "workspace"), and its offset in
bytes."""
Sizes = tuple[int, ...]
TensorMap = tuple[Literal["tensor_map"], Address, str, Sizes, Sizes, Sizes, int]
"""("tensor_map", address, element, shape, strides, box, swizzle bytes)"""
KernelArgument = Address | TensorMap | tuple[str, int | float]
"""An address, a tensor map, or ("int32", value), ("int64", value) or ("float", value)."""
Dim3 = tuple[int, int, int]
KernelLaunch = tuple[
    Literal["kernel"], bytes, str, Dim3, Dim3, Dim3, int, tuple[KernelArgument, ...]
]
"""("kernel", cubin, function, grid, block, cluster, dynamic shared bytes of a block, arguments)"""
EngineLaunch = tuple[
    Literal["engine"], ConvProblem, str, Address, Address, Address, Address | None, Address | None
]
"""("engine", its problem, engine text, x, w, y, bias, residual)"""
PythonLaunch = tuple[Literal["python"], Callable[..., object]]
"""("python", function); it is called as in ``engines.recipe.PythonLaunch``."""

def recipe_plan(
    problem: ConvProblem,
    text: str,
    launches: Sequence[KernelLaunch | EngineLaunch | PythonLaunch],
    workspace_bytes: int,
    device: int,
) -> Plan:
    """Loads and builds a recipe's kernels and engines (csrc/plan/recipe_plan.h).

    Raises ValueError for launches of another form, and PlanError, which names ``text``, if a kernel
    does not load or an engine does not build.
    """

class NormPlan:
    """The launches of a batch norm (csrc/norm/norm_plan.h).

    Args:
        launches: (cubin, function, blocks, threads, dynamic shared bytes of a block).
        division: slabs, parts of a slab, units of a part.
        workspace: bytes of sums and of totals.
        counters: number of counters of 8 bytes.
        pointers: number of a kernel's addresses, with the workspace's.
        floats: number of a kernel's last arguments, in float32.

    Raises PlanError if a kernel does not load.
    """

    def __init__(
        self,
        launches: Sequence[tuple[bytes, str, int, int, int]],
        division: tuple[int, int, int],
        workspace: tuple[int, int],
        counters: int,
        pointers: int,
        floats: int,
    ) -> None: ...

def set_norm_planner(planner: Callable[..., NormPlan | None]) -> None: ...
def set_norm_chooser(chooser: Callable[..., tuple[bool, int] | None]) -> None:
    """Sets the function that chooses the kernels of norms, called with (input, weight, bias,
    running mean, running variance, eps, activation, groups, converted module or None, sampling
    mode). It returns whether this package's serve, and for how many calls (0: all); None if it
    cannot choose now."""

class NormsByKernels:
    """A context in which this package's kernels compute this thread's calls of ATen's norms if they
    can, against any choice."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

def forget_aten_norms() -> None:
    """Clears the choices for norms: the next call of each signature needs a new one."""

def is_of_kernels(mean: Tensor) -> bool:
    """Returns whether this package's kernels computed a norm, by the mean that PyTorch saved."""

def set_weight_kernels(kernels: Callable[..., bytes]) -> None:
    """Sets the function that compiles the kernel of ``fold_weights``, called with (device, dtype of
    the weights, dtype of the results)."""

def set_norm_form(form: int) -> None:
    """Sets the form of norms' plans in all threads: its place in FORMS of norms/plan.py, from 1 on,
    or 0 for the adopted one, else the first one."""

def set_norm_form_of_thread(form: int, adopts: bool) -> None:
    """Sets the form likewise for the calls of this thread. With ``adopts`` their plans serve all
    later calls without a form."""

def execute(plan: Plan, *tensors: Tensor, workspace: Tensor | None = None) -> Tensor:
    """Runs a plan on the current stream, and returns the result: the operation's written tensor, or
    a new one of PyTorch's own path. Raises PlanError.

    ``workspace`` has the plan's ``workspace_bytes`` or more; None: it is allocated.
    """

def compare_output(problem: ConvProblem, tensors: Sequence[Tensor], seed: int) -> Tensor:
    """Compares an output with the convolution's definition, at a sample of its places that ``seed``
    draws; NaN is looked for everywhere.

    ``tensors`` are x, w, y, and the bias and the residual that the problem has, on any device, in
    any layout; the operation's output is one of them. Returns numbers in float64 on their device
    (csrc/measure/sampled_reference.h) for :func:`read_comparison`.
    """

def read_comparison(numbers: Tensor) -> tuple[float, float, float, float, list[float]]:
    """Reads a result of :func:`compare_output`, on the CPU.

    Returns the norm of the sampled reference; the norm of its difference to the output; the largest
    ratio of both in one place or channel; the share of nonzero references among places or channels
    that operands reach; and the largest magnitude in the output and in each read operand (NaN if
    there is one).

    Raises:
        ValueError: ``numbers`` are not of :func:`compare_output`.
    """

MOST_UNUSED_CUBINS: int

def loaded_cubins() -> int:
    """Returns the number of loaded cubins: all that plans use, and at most ``MOST_UNUSED_CUBINS``
    others."""

def kept_for_graphs() -> int:
    """Returns the number of objects that living CUDA graphs use: plans, pages for workspaces,
    counters of norms. An object of two captures counts twice."""

def is_matmul(problem: ConvProblem) -> bool: ...
def keep_plans(
    behavior_note: str,
    find: Callable[[str, str, int | str], bytes | None],
    keep: Callable[[str, str, int | str, bytes], None],
) -> None:
    """Sets the functions that keep the plans of engines with this note, or of all if it is empty.

    Both functions take the texts of the problem and of the engine config, and the GPU: the index of
    a CUDA device, or the JSON description of one that need not be here. They are called on any
    thread, and must not raise.
    """

class EngineList:
    @staticmethod
    def on_device(problem: ConvProblem, device: int) -> EngineList: ...
    @staticmethod
    def by_properties(problem: ConvProblem, json: str) -> EngineList: ...
    def query(self, heuristic_mode: str) -> list[Candidate]: ...
    def build(self, text: str) -> Plan:
        """Builds as :func:`build_plan`, and an engine without opening the search again."""

    def read_back(self, text: str) -> Plan | None:
        """Returns the kept plan of an engine; None if there is none, or if it is no engine."""

    def describe(self, engine_text: str) -> Candidate: ...
    def build_many(self, texts: Sequence[str], threads: int) -> list[tuple[Plan | None, str]]:
        """Builds each on one of several threads; None and the reason for each that does not
        build."""

def canonical_engine_text(text: str) -> str: ...
def parse_engine_text(text: str) -> tuple[int, dict[str, int]]: ...
def engine_text(engine: int, knobs: Mapping[str, int]) -> str: ...
def frontend_find(
    technique: str,
    plans: Sequence[Plan],
    tensors: Sequence[Tensor],
    workspace: Tensor | None,
    benchmark_limit: int,
) -> tuple[list[tuple[int, float, int]], int]:
    """Returns the index in ``plans``, the time in ms and the samples of each plan, fastest first,
    and the samples of all plans."""

def far_pages(cycles: Sequence[int]) -> list[int]:
    """Returns the pages in the far partition of the L2 cache, by the latencies of all in cycles
    from the multiprocessor with the highest number; empty if these form one group."""

def workspace_pages(device: int) -> tuple[int, int]:
    """Returns the numbers of all and of free pages for small workspaces. Waits until they are
    measured.
    """

class PlanTimer:
    """Measures candidates of one problem (csrc/measure/plan_timer.h)."""

    PLACE_BYTES: int
    PLACES: int
    def __init__(
        self,
        problem: ConvProblem,
        operands: Sequence[Sequence[Tensor]],
        flush_bytes: int,
        workspace_pages: bool = True,
    ) -> None: ...
    def add(self, plan: Plan) -> int: ...
    def set_workspace(self, workspace: Tensor) -> None: ...
    def run(
        self, batches: Sequence[tuple[int, int, bool, bool]], lead: int
    ) -> list[tuple[float, float, float, str]]:
        """Runs batches in their order, and returns a sample of each.

        Args:
            batches: (candidate, calls, whether the L2 cache is cold, whether from a CUDA graph).
            lead: number of batches that the host enqueues before the GPU starts; 0 for first runs.

        Returns:
            (milliseconds of a call, clock in MHz or 0, milliseconds of loading the kernel before a
            first run, the error or ""), for each batch.
        """

class TurnSchedule:
    """The assignment of an :class:`OnlineTrial`'s implementations to calls.

    Implementations are given by their index in the order of joining. An absent index raises
    IndexError. No method calls CUDA or cuDNN, and all are thread-safe.
    """

    def take_samples(self) -> list[tuple[int, int, float]]:
        """Returns and removes the new samples: (implementation, round, milliseconds)."""

    def failures(self) -> list[int]:
        """Returns the implementations that failed to run; they have no more turns."""

    def drop(self, implementation: int) -> None: ...
    def set_leader(self, implementation: int) -> None:
        """Sets the implementation that serves the calls without a measurement."""

    def rest(self, implementations: int) -> None:
        """Lets the leader serve every call, untimed, until another implementation joins or one
        fails. Does nothing if more than this number have joined already."""

    def decide(self, implementation: int | None, is_provisional: bool = False) -> None:
        """Ends the trial; None chooses PyTorch's own path. If the choice is provisional, the miss
        handler is called again after some calls."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether an implementation has failed in a turn because memory was short."""

    @property
    def is_in_use(self) -> bool:
        """Whether more calls can come."""

    @property
    def calls(self) -> int: ...
    @property
    def implementation_count(self) -> int:
        """The number of implementations that have joined, with dropped ones."""

    # Called by the trial itself:
    def take_turn(self) -> tuple[int, int] | None:
        """Returns the turn of this call: (implementation, round).

        None: the leader serves the call, and it is not measured. That is the case for one of every
        two calls, and while fewer than two implementations have joined.
        """

    def leader(self) -> int: ...
    def report(self, implementation: int, round: int, time_ms: float) -> None: ...
    def fail(self, implementation: int) -> bool:
        """Records that an implementation failed to run or is wrong, and drops it. If no other is
        active, implementations dropped for another reason become active again. Returns whether
        there are any."""

PreparationStep = Callable[..., tuple[Plan | None, int]]
"""(*operands) -> (the joining plan, or None; the number of calls to the next step, 0: there is
none)."""

class OnlineTrial:
    def __init__(self, first: Plan, preparation_step: PreparationStep, first_step: int = 2) -> None:
        """``first_step`` is the number of the call in which the preparation begins."""

    @property
    def schedule(self) -> TurnSchedule: ...
    def join(self, implementation: Plan) -> None: ...
    @property
    def decided(self) -> str | None:
        """The text of the choice; None until the trial is decided."""

MissHandler = Callable[..., tuple[Plan, OnlineTrial | None, bool, Callable[[], None] | None]]
"""(problem, sampling, workspace_limit, benchmark_limit, device, *operands, serving=plan) -> (the
plan of the choice; the trial that is to decide it, or None; whether the choice is provisional; a
function to call once other threads may tune again, or None).

``serving`` is the plan that serves the thread provisionally, or None. The handler is asked again
after 16 calls of a provisional choice, and then after twice as many each time.
"""

def set_miss_handler(handler: MissHandler) -> None: ...

CaptureMissHandler = Callable[[ConvProblem, str, int, int, int], Plan]
"""(problem, sampling, workspace_limit, benchmark_limit, device) -> the plan of the problem's known
choice, or else what PyTorch would run. Called during a stream's capture, when candidates must not
be timed or run."""

def set_capture_miss_handler(handler: CaptureMissHandler) -> None: ...
def expected_gradients() -> tuple[bool, bool]:
    """Returns whether the backward of this thread's forward convolution is expected to need the
    gradients of its input and of its weight."""

def forget_choices() -> None: ...
def forget_problem(problem: ConvProblem) -> None: ...
def set_plan_cache_capacity(plans: int) -> None: ...
def plan_cache_capacity() -> int: ...
