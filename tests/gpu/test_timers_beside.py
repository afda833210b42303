"""Timers beside other threads: what these launch is neither captured nor lost, and nobody waits for
ever. Kernels that are unloaded have run."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.conv.references import assert_close, random_operands, reference
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.recipe import Kernel, PythonLaunch, Recipe
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.timers.timer import Batch

ALLOWED = 2e-3
# Calls of some 10 us, which are replayed from graphs.
SHORT: dict[str, Any] = {
    "input_shape": (4, 32, 14, 14), "weight_shape": (48, 32, 3, 3), "padding": 1,
    "dtype": torch.float16, "memory_format": torch.channels_last,
}  # fmt: skip


class Beside:
    """Work that another thread repeats until the end of the ``with`` block, which raises its
    error."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.times = 0
        self._work = work
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._work()
                self.times += 1
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "deadlock"
        for error in self._errors:
            raise error


def first_calls(seed: int) -> Callable[[], None]:
    """First calls of ever new layers, whose results are compared."""
    numbers = itertools.count(1)
    generator = torch.Generator().manual_seed(seed)

    def work() -> None:
        channels = 8 * next(numbers)
        x = torch.randn(2, 16, 12, 12, generator=generator)
        w = torch.randn(channels, 16, 3, 3, generator=generator)
        x, w = x.half(), w.half()
        y = ca.functional.conv2d(x.cuda(), w.cuda(), padding=1)
        right = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
        assert_close(y, right, ALLOWED)

    return work


def measure(timer: GpuTimer, rounds: int) -> None:
    """Measures from graphs, each of which is captured anew."""
    timer.runnable([OWN_PATH])
    for _ in range(2):
        timer.run([Batch(OWN_PATH, 1, "hot")])
    for calls in range(2, 2 + rounds):
        for sample in timer.run([Batch(OWN_PATH, calls, "hot"), Batch(OWN_PATH, calls, "cold")]):
            assert not sample.error


def test_what_another_thread_launches_is_not_captured() -> None:
    """On none of PyTorch's streams."""
    streams = [torch.cuda.Stream() for _ in range(64)]
    counters = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()

    def count() -> None:
        for stream, counter in zip(streams, counters, strict=True):
            with torch.cuda.stream(stream):
                counter.add_(1)

    timer = GpuTimer.open(ca.ConvProblem("fprop", **SHORT))
    with Beside(count) as beside:
        measure(timer, 60)
    torch.cuda.synchronize()
    timer.close()
    assert beside.times > 0
    assert [int(counter) for counter in counters] == [beside.times] * len(streams)


def test_timers_of_several_threads_take_turns() -> None:
    problem = ca.ConvProblem("fprop", **SHORT)

    def work() -> None:
        a, b = random_operands(problem, "cuda")
        y = torch.zeros(problem.output_shape, dtype=problem.dtype, device="cuda")
        y = y.contiguous(memory_format=problem.memory_format)
        torch.cuda.current_stream().synchronize()  # of the device it fails beside a capture
        search = _C.EngineList.on_device(problem.native(), 0)
        timer = GpuTimer(problem, search, (a, b, y))
        engines = [
            c for c in ca.expert.candidates(problem) if c.engine is not None and not c.is_compiled
        ]
        for candidate in timer.runnable(engines)[:3]:
            timer.run([Batch(candidate, 1, "hot")])
            for calls in (5, 7):
                (sample,) = timer.run([Batch(candidate, calls, "hot")])
                assert not sample.error
            assert_close(y, reference(problem, a, b), ALLOWED, candidate.text)
        timer.close()

    with Beside(work) as one, Beside(work) as other:
        end_s = time.monotonic() + 4
        while time.monotonic() < end_s or min(one.times, other.times) < 1:
            time.sleep(0.1)


def test_a_model_is_tuned_while_others_first_call_layers(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    x = torch.randn(4, 16, 20, 20, device="cuda").half()
    with Beside(first_calls(1)) as one, Beside(first_calls(2)) as other:
        end_s = time.monotonic() + 6
        for channels in itertools.count(24, 8):
            model = nn.Sequential(
                ca.Conv2d(16, channels, 3, padding=1), ca.Conv2d(channels, 16, 3, padding=1)
            )
            model.cuda().half()
            assert len(ca.tune(model, x, train=False)) == 2
            with torch.no_grad():
                y = model(x)
                right = model.float().double().cpu()(x.double().cpu())
            assert_close(y, right, ALLOWED)
            if time.monotonic() > end_s:
                break
    assert min(one.times, other.times) > 3


def test_a_function_in_python_is_measured_while_others_tune() -> None:
    """It needs the GIL while it is measured, and no thread that has that waits for the other."""
    problem = ca.ConvProblem("fprop", **SHORT)
    data = operands(problem, "cuda")
    native = _C.PlanTimer(problem.native(), [data], 0)
    launch = PythonLaunch(lambda x, w, y, *others: y.fill_(1))
    number = native.add(recipe_plan(problem, "mine@1:", Recipe((launch,), 0), 0))
    with Beside(first_calls(3)) as beside:
        end_s = time.monotonic() + 4
        while time.monotonic() < end_s or beside.times < 2:
            ((*_, error),) = native.run([(number, 20, False, False)], 0)
            assert not error
    assert bool((data[2] == 1).all())


def test_a_callback_may_wait_for_a_lock_that_another_thread_holds_while_it_convolves() -> None:
    lock, holds, convolved = threading.RLock(), threading.Event(), threading.Event()
    one, other = first_calls(4), first_calls(5)
    errors: list[BaseException] = []

    def take_lock(choice: ca.Choice) -> None:
        with lock:
            pass

    def convolve() -> None:
        try:
            with lock:
                holds.set()
                time.sleep(1.0)  # meanwhile the other thread tunes, and calls back
                other()
            convolved.set()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=convolve, daemon=True)
    caller = threading.Thread(target=one, daemon=True)
    with ca.on_decision(take_lock):
        thread.start()
        assert holds.wait(60)
        caller.start()
        assert convolved.wait(60), "deadlock"
        for each in (thread, caller):
            each.join(60)
            assert not each.is_alive()
    assert errors == []


def test_a_callback_may_convolve() -> None:
    work = first_calls(6)
    heard: list[ca.Choice] = []

    def convolve(choice: ca.Choice) -> None:
        heard.append(choice)
        if len(heard) < 4:
            work()

    with ca.on_decision(convolve):
        work()
    assert len(heard) == 4


def test_a_walk_through_many_sizes_unloads_kernels_that_have_run() -> None:
    """Each writes its number once the GPU, which is busy, comes to it. Then its plan is gone."""
    problem = ca.ConvProblem("fprop", **SHORT)
    x, w, y = operands(problem, "cuda")
    source = """
    extern "C" __global__ void put(unsigned short* y) { y[NUMBER] = NUMBER; }
    """
    count = 2 * _C.MOST_UNUSED_CUBINS + 50
    capability = torch.cuda.get_device_capability()
    kernels = [Kernel(source, "put", (("NUMBER", number),)) for number in range(count)]
    codes = [cubin(kernel, capability) for kernel in kernels]
    before = _C.loaded_cubins()
    y.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    for code in codes:
        launch = ("kernel", code, "put", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, (("y", 0),))
        plan = _C.recipe_plan(problem.native(), "mine@1:", [launch], 0, 0)
        _C.execute(plan, x, w, y)
        del plan
        assert _C.loaded_cubins() <= before + _C.MOST_UNUSED_CUBINS + 2
    torch.cuda.synchronize()
    # In the order of the memory, which is channels last.
    bits: Tensor = y.permute(0, 2, 3, 1).reshape(-1).view(torch.int16)[:count]
    assert torch.equal(bits.cpu(), torch.arange(count, dtype=torch.int16))
    assert _C.loaded_cubins() < before + count
