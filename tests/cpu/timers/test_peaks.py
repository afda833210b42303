"""The measuring of a GPU's peaks, on a simulated one: tensors hold no data, and each operation
takes the time that it should."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_autotune.timers import peaks

pytestmark = pytest.mark.search

OWN_PATH = torch.ops.aten
TRAFFIC = {OWN_PATH.sum.default: 1, OWN_PATH.copy_.default: 2, OWN_PATH.add.out: 3}
PRECISION = ("cuda", "matmul")


class Gpu(TorchDispatchMode):
    """``bytes_per_ms`` holds for copies; the other streams are a little slower."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.bytes_per_ms = 4e9
        self.flops_per_ms = {
            "float16": 8e11,
            "bfloat16": 7e11,
            "tf32": 4e11,
            "float32": 5e10,
            "float64": 6e10,
        }
        self.launch_ms = 0.002
        self.capability = (9, 0)
        self.l2_bytes = 60 << 20
        self.free_bytes = 140 << 30
        self.sides: dict[str, list[int]] = {}
        self.slow: Iterator[float] = itertools.repeat(1.0)
        """How many times as long each operation takes as it should."""
        self.captured_ms: float | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        took = self.launch_ms
        if func in TRAFFIC:
            assert args[0].nbytes >= 8 * self.l2_bytes
            share = 1.0 if func is OWN_PATH.copy_.default else 0.9
            took = TRAFFIC[func] * args[0].nbytes / (share * self.bytes_per_ms)
        elif func is OWN_PATH.mm.out:
            side = args[0].shape[0]
            name = str(args[0].dtype).removeprefix("torch.")
            precision = torch._C._get_fp32_precision_getter(*PRECISION)
            assert precision in ("tf32", "ieee")
            if name == "float32" and precision == "tf32":
                name = "tf32"
            # Its start and end, in which not all of the GPU has work, weigh in small products.
            took += 0.005 + 2 * side**3 / self.flops_per_ms[name]
            sides = self.sides.setdefault(name, [])
            if side not in sides:
                sides.append(side)
        took *= next(self.slow)
        if self.captured_ms is not None:
            self.captured_ms += took
        else:
            self.now_ms += took
        return result


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = made.now_ms

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms + 0.0005  # what events add

    class Graph:
        def __init__(self, *_: object, **__: object) -> None:
            self.took_ms = 0.0

        def replay(self) -> None:
            made.now_ms += self.took_ms

    class Capture:
        def __init__(self, graph: Graph, stream: object) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            made.captured_ms = 0.0

        def __exit__(self, *_: object) -> None:
            self.graph.took_ms, made.captured_ms = made.captured_ms or 0.0, None

    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": lambda: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda index: SimpleNamespace(L2_cache_size=made.l2_bytes),
        "get_device_capability": lambda: made.capability,
        "mem_get_info": lambda: (made.free_bytes, 140 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # There is no generator of a GPU.
    tensors = lambda *shape: [torch.empty(shape, device="cuda") for _ in range(2)]  # noqa: E731
    monkeypatch.setattr(peaks, "_random", tensors)
    before = torch._C._get_fp32_precision_getter(*PRECISION)
    with FakeTensorMode(), made:
        yield made
    assert torch._C._get_fp32_precision_getter(*PRECISION) == before


def test_the_peaks_are_those_of_the_gpu(gpu: Gpu) -> None:
    found = peaks.measure()
    assert found.bytes_per_ms == pytest.approx(gpu.bytes_per_ms, rel=0.01)
    assert found.flops_per_ms.keys() == gpu.flops_per_ms.keys()
    for name, rate in found.flops_per_ms.items():
        assert rate == pytest.approx(gpu.flops_per_ms[name], rel=0.01), name
    assert found.launch_ms == pytest.approx(gpu.launch_ms, rel=0.01)
    assert gpu.now_ms < 400


def test_products_grow_until_they_fill_the_gpu(gpu: Gpu) -> None:
    peaks.measure()
    assert gpu.sides["float16"] == [1024, 2048, 4096, 8192]
    assert gpu.sides["float32"] == [1024, 2048, 4096]


def test_slow_arithmetic_takes_no_second(gpu: Gpu) -> None:
    """As float64 on a GPU that is not made for it."""
    gpu.flops_per_ms["float64"] = 2.5e8
    found = peaks.measure()
    assert gpu.sides["float64"] == [1024]
    assert found.flops_per_ms["float64"] == pytest.approx(2.5e8, rel=0.01)
    assert gpu.now_ms < 1000


def test_a_rising_clock_and_disturbances_cost_nothing(gpu: Gpu) -> None:
    # Twice as slow at first, later three times now and then.
    late = (3.0 if count % 97 == 0 else 1.0 for count in itertools.count(1))
    gpu.slow = itertools.chain(itertools.repeat(2.0, 20), late)
    found = peaks.measure()
    assert found.bytes_per_ms == pytest.approx(gpu.bytes_per_ms, rel=0.02)
    for name, rate in found.flops_per_ms.items():
        assert rate == pytest.approx(gpu.flops_per_ms[name], rel=0.02), name


def test_a_failure_restores_the_precision(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture compares it."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        peaks.measure()
