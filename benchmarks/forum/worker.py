"""The worker of forum_repro.py: one mode, one process, every iteration timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from common import numbers
from common.convolution import OUR_MODES, TORCH_MODES


def engine_reader(mode: str, device: str) -> Any:
    """A function that says which engine serves each direction now; None for PyTorch's modes."""
    if mode in TORCH_MODES or device == "cpu":
        return None
    import cudnn_autotune as ca

    return lambda: {choice.problem.op: choice.text for choice in ca.choices()}


def kernel_names(call: Any) -> tuple[list[str], str | None]:
    """GPU kernels of one call by torch.profiler, longest first, and why there are none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
        with profile(activities=activities, acc_events=True) as profiler:
            call()
            torch.cuda.synchronize()
        spent: dict[str, float] = {}
        for event in profiler.events():
            if event.device_type.name == "CUDA":
                spent[event.name] = spent.get(event.name, 0.0) + event.device_time
        names = sorted(spent, key=lambda name: -spent[name])
        return names, None if names else "the profiler saw no kernel"
    except Exception as error:  # a machine without CUPTI: the times stand without the names
        return [], f"{type(error).__name__}: {error}"


class Stopwatch:
    """Start and duration of each iteration: CUDA events, or the host clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, call: Any, *, wait: bool) -> None:
        begin = self.mark()
        call()
        end = self.mark()
        self.marks.append((begin, end))
        if wait and self.device == "cuda":
            end.synchronize()

    def times(self, first: Any) -> tuple[list[float | None], list[float | None]]:
        """(start since `first`, duration) of each iteration, ms."""
        if self.device == "cpu":
            starts = [(begin - first) * 1e3 for begin, _ in self.marks]
            durations = [(end - begin) * 1e3 for begin, end in self.marks]
        else:
            starts = [first.elapsed_time(begin) for begin, _ in self.marks]
            durations = [begin.elapsed_time(end) for begin, end in self.marks]
        return numbers.all_significant(starts, 7), numbers.all_significant(durations, 5)


def measure_mode(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: runs the iterations of one mode, yields their record, then kernels' names."""
    import torch
    from common.convolution import from_described, our_call, set_torch_mode, tensors, torch_call
    from common.timing import synchronize

    mode, device = request["mode"], request["device"]
    torch.manual_seed(0)
    cases = [from_described(case) for case in request["cases"]]
    data = tensors(cases[0], device)  # all directions share the layer's tensors
    if mode in TORCH_MODES:
        set_torch_mode(mode)
    ours = mode in OUR_MODES and device == "cuda"
    calls = {c.op: our_call(c, data, mode) if ours else torch_call(c, data) for c in cases}
    engines = engine_reader(mode, device)
    watches = {op: Stopwatch(device) for op in calls}
    total = request["warmup"] + request["iterations"]
    wait = request["sync"] == "each"
    seen: list[dict[str, Any]] = []

    def look(iteration: int) -> None:
        now = engines()
        if not seen or seen[-1]["engines"] != now:
            seen.append({"from_iteration": iteration, "engines": now})

    torch.randn(1, device=device).sum().item()  # the context exists before the clock starts
    synchronize(device)
    begin_s = time.monotonic()
    first = next(iter(watches.values())).mark()
    done = 0
    for iteration in range(total):
        for op, call in calls.items():
            watches[op].run(call, wait=wait)
        done += 1
        # Listing choices costs host time: often at first, then now and again.
        if engines is not None and (iteration < 5 or iteration % 50 == 0 or iteration == total - 1):
            look(iteration)
        if request["sleep_ms"]:
            time.sleep(request["sleep_ms"] / 1e3)
        if time.monotonic() - begin_s > request["seconds"]:
            break
    synchronize(device)
    end_s = time.monotonic()
    record: dict[str, Any] = {
        "mode": mode,
        "begin_monotonic_s": begin_s,
        "end_monotonic_s": end_s,
        "iterations_done": done,
        "warmup": request["warmup"],
        "engines": seen,
        "directions": {},
    }
    for op, watch in watches.items():
        starts, durations = watch.times(first)
        record["directions"][op] = {"start_ms": starts, "duration_ms": durations}
    if engines is not None:
        import cudnn_autotune as ca

        for choice in ca.choices():
            record["directions"].setdefault(choice.problem.op, {})["choice"] = {
                "engine_config": choice.text,
                "time_ms": choice.time_ms,
                "workspace_bytes": choice.workspace_bytes,
                "tuning_ms": numbers.significant(choice.tuning_ms),
                "candidates": choice.candidates,
                "total_samples": choice.total_samples,
            }
    yield record
    # After the times are safe: the profiler is the one thing here that may fail on its own.
    if device == "cuda" and request["profile"]:
        for op, call in calls.items():
            kernels, why = kernel_names(call)
            yield {"mode": mode, "op": op, "kernels": kernels[:4], "no_kernels_because": why}
