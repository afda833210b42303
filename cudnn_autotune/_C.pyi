from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

built_with_torch: str
built_with_cuda: str

# Everything below "search" exists only in a build with CUDA.

# settings

class Settings:
    def __init__(self, sampling: str, workspace_limit: int, benchmark_limit: int) -> None: ...
    @property
    def sampling(self) -> str: ...
    @property
    def workspace_limit(self) -> int: ...
    @property
    def benchmark_limit(self) -> int: ...

def settings() -> Settings: ...
def set_settings(settings: Settings) -> None: ...
def register_sampling(name: str) -> None: ...
def fallbacks() -> dict[str, int]: ...
def clear_fallbacks() -> None: ...

# the short way to the operator: NotImplemented for what it does not take

def conv2d(
    input: object,
    weight: object,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    groups: object,
    sampling: object,
    workspace_limit: object,
    /,
) -> Tensor: ...

# search

class CudnnError(RuntimeError): ...

def cudnn_runtime_version() -> int: ...
def cudnn_frontend_version() -> str: ...

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
        alignment: tuple[int, int, int],
    ) -> None: ...
    @property
    def op(self) -> str: ...
    @property
    def input_shape(self) -> list[int]: ...
    @property
    def weight_shape(self) -> list[int]: ...
    @property
    def output_shape(self) -> list[int]: ...
    @property
    def stride(self) -> list[int]: ...
    @property
    def padding(self) -> list[int]: ...
    @property
    def dilation(self) -> list[int]: ...
    @property
    def groups(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def memory_format(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def allow_tf32(self) -> bool: ...
    @property
    def allow_reduced_precision(self) -> bool: ...
    @property
    def alignment(self) -> tuple[int, int, int]: ...
    @property
    def text(self) -> str: ...

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

def is_allowed(candidate: Candidate, problem: ConvProblem, workspace_limit: int) -> bool: ...

class Plan:
    @property
    def text(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...

class EngineSearch:
    @staticmethod
    def on_device(problem: ConvProblem, device: int) -> EngineSearch: ...
    @staticmethod
    def by_properties(problem: ConvProblem, json: str) -> EngineSearch: ...
    def query(self, heuristic_mode: str) -> list[Candidate]: ...
    def build(self, engine_text: str) -> Plan: ...
    def build_many(
        self, engine_texts: Sequence[str], threads: int
    ) -> list[tuple[Plan | None, str]]: ...

def parse_engine_text(text: str) -> tuple[int, dict[str, int]]: ...
def engine_text(engine: int, knobs: Mapping[str, int]) -> str: ...

class FoundPlan:
    @property
    def index(self) -> int: ...
    @property
    def time_ms(self) -> float: ...
    @property
    def samples(self) -> int: ...

class FindResult:
    @property
    def plans(self) -> list[FoundPlan]: ...
    @property
    def total_samples(self) -> int: ...

def frontend_find(
    technique: str,
    plans: Sequence[Plan],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    workspace: Tensor | None,
    benchmark_limit: int,
) -> FindResult: ...
def execute(plan: Plan, x: Tensor, w: Tensor, y: Tensor) -> None: ...
def page_cycles(memory: Tensor) -> list[int]:
    """To each 4 KiB page of it, from one multiprocessor. Zeros where it did not come to run."""

def far_pages(cycles: Sequence[int]) -> list[int]:
    """Those of the L2 cache's far partition; none where the cycles are of one kind."""

def workspace_pages(device: int) -> tuple[int, int]:
    """How many pages there are for small workspaces, and how many of them no stream or graph has.
    Waits for their measurement."""

class PlanTimer:
    PLACE_BYTES: int
    PLACES: int
    def __init__(
        self,
        problem: ConvProblem,
        operands: Sequence[tuple[Tensor, Tensor, Tensor]],
        flush_bytes: int,
        workspace_pages: bool = True,
    ) -> None: ...
    def add(self, text: str, plan: Plan | None) -> int: ...
    def set_workspace(self, workspace: Tensor) -> None: ...
    def run(
        self, batches: Sequence[tuple[int, int, bool, bool]], lead: int
    ) -> list[tuple[float, float, float, str]]:
        """(candidate, calls, cold, as graph)
        -> (ms a call, MHz or 0, ms of loading before, error or empty)."""

def is_matmul(problem: ConvProblem) -> bool: ...
def run_aten(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> Tensor: ...
def run_matmul(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> None: ...

class TrialLedger:
    """Of an :class:`OnlineTrial`: its ways by number. No method calls CUDA or cuDNN."""

    def take_samples(self) -> list[tuple[int, int, float]]:
        """(way, round, milliseconds) of the calls that are over, since this was last asked."""

    def failures(self) -> list[int]: ...
    def drop(self, way: int) -> None: ...
    def lead(self, way: int) -> None: ...
    def decide(self, way: int | None) -> None:
        """None: PyTorch's own path."""

    @property
    def is_in_use(self) -> bool:
        """Whether calls may still come."""

    @property
    def calls(self) -> int: ...
    @property
    def ways(self) -> int:
        """How many have joined."""

    # What the trial itself notes, in its calls:
    def take_turn(self) -> tuple[int, int, bool] | None:
        """(way, round, whether it is its first); None: the call is the leader's, and not timed, as
        one of each two is, and all where there is nothing to compare."""

    def leading(self) -> int: ...
    def report(self, way: int, round: int, time_ms: float) -> None: ...
    def fail(self, way: int) -> bool:
        """Whether another way is left."""

Chore = Callable[[Tensor, Tensor, Tensor], tuple[tuple[str, Plan | None] | None, bool]]
"""(x, w, y) -> (a way that joins, or None; whether there is more to do)."""

class OnlineTrial:
    def __init__(self, first: tuple[str, Plan | None], chore: Chore) -> None: ...
    @property
    def ledger(self) -> TrialLedger: ...
    def join(self, way: tuple[str, Plan | None]) -> None: ...
    @property
    def decided(self) -> str | None:
        """What was chosen; None while undecided."""

MissHandler = Callable[
    [ConvProblem, str, int, int, int, Tensor, Tensor, Tensor],
    tuple[str, Plan | None, OnlineTrial | None],
]

def set_miss_handler(handler: MissHandler) -> None: ...

KnownHandler = Callable[[ConvProblem, str, int, int, int], str | None]

def set_known_handler(handler: KnownHandler) -> None: ...
def forget_choices() -> None: ...
def forget_problem(problem: ConvProblem) -> None: ...
def set_plan_cache_capacity(plans: int) -> None: ...
def plan_cache_capacity() -> int: ...
