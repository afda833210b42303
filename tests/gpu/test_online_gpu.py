"""``online``: candidates take turns in the caller's own calls, and nobody notices but the clock."""

from __future__ import annotations

import functools
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.conv.references import assert_close
from support.processes.subprocesses import python
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.engines.unlisted import is_seldom_fastest
from cudnn_autotune.online.race import OnlineRace
from cudnn_autotune.online.tuner import TUNER
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning import checking
from cudnn_autotune.tuning.checking import OutputCheck

# Which thread compiles, and whether a call waits meanwhile, is what these tests ask.
pytestmark = pytest.mark.compiles

NHWC = torch.channels_last
ALLOWED = 4e-3
MOST_CALLS = 300_000
MOST_S = 240.0  # other processes may use the GPU

# input shape, weight shape, keywords of conv2d; float16
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "dense": ((8, 32, 28, 28), (32, 32, 3, 3), {"padding": 1}),
    "pointwise": ((8, 64, 14, 14), (96, 64, 1, 1), {}),
    "depthwise": ((8, 32, 28, 28), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    # Engines that are compiled at run time are among the candidates.
    "grouped": ((8, 48, 28, 28), (48, 24, 3, 3), {"padding": 1, "groups": 2}),
    # Fewer channels than PyTorch asks for before it uses cuDNN.
    "depthwise_nchw": ((8, 16, 28, 28), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
}


def memory_format(name: str) -> torch.memory_format:
    return torch.contiguous_format if name.endswith("nchw") else NHWC


@pytest.fixture(autouse=True)
def no_trial_is_left() -> Iterator[None]:
    yield
    ca.forget()
    deadline = time.monotonic() + 30
    while TUNER.undecided and time.monotonic() < deadline:
        time.sleep(0.02)
    assert TUNER.undecided == 0, "a trial outlives forget()"


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials go on for ever: whatever is tested then is tested in mid-trial."""
    monkeypatch.setattr(OnlineRace, "judge", lambda self: None)


def operands(name: str = "dense", seed: int = 0) -> tuple[Tensor, Tensor]:
    input_shape, weight_shape, _ = LAYERS[name]
    generator = torch.Generator().manual_seed(seed)
    input, weight = (
        torch.randn(shape, generator=generator)
        .to("cuda", torch.float16)
        .contiguous(memory_format=memory_format(name))
        for shape in (input_shape, weight_shape)
    )
    return input, weight


def expected(name: str, input: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(
        input.cpu().double(), weight.cpu().double(), **LAYERS[name][2]
    )


def call(name: str, input: Tensor, weight: Tensor) -> Tensor:
    return ca.functional.conv2d(input, weight, **LAYERS[name][2], sampling="online")


def until(is_reached: Callable[[], bool], once: Callable[[], object], what: str) -> int:
    """Calls ``once`` until ``is_reached``; how often it was called."""
    deadline = time.monotonic() + MOST_S
    for calls in range(MOST_CALLS):
        if is_reached():
            return calls
        once()
        if calls % 16 == 15:
            torch.cuda.synchronize()  # a loop that reads its loss now and then
        if TUNER.preparing:
            time.sleep(0.001)  # engines are being compiled, and other layers would run
        assert time.monotonic() < deadline, f"{what}: not after {calls} calls and {MOST_S:g} s"
    raise AssertionError(f"{what}: not after {MOST_CALLS} calls")


def converge(once: Callable[[], object]) -> int:
    once()
    return until(lambda: TUNER.undecided == 0, once, "decided")


def ways(choice: ca.Choice) -> list[str]:
    return [entry.candidate.text for entry in choice.selection.ranking]


@pytest.mark.parametrize("name", LAYERS)
def test_every_call_is_right_and_it_is_decided(name: str) -> None:
    input, weight = operands(name)
    right = expected(name, input, weight)
    assert_close(call(name, input, weight), right, ALLOWED, "first call")
    (first,) = ca.choices()
    assert first.total_samples == 0
    wrong = torch.zeros((), device="cuda")
    device_right = right.cuda()
    norm = device_right.norm()

    def once() -> None:
        # Compared on the GPU: reading every result would make each call wait.
        output = call(name, input, weight).double()
        wrong.add_(((output - device_right).norm() / norm > ALLOWED).float())

    assert converge(once) >= 8
    assert wrong.item() == 0
    (choice,) = ca.choices()
    assert choice.sampling == "online"
    assert choice.selection.total_samples > 0
    evidence = choice.selection.evidence
    assert choice.text in evidence.tied
    assert evidence.rule
    assert evidence.gpu_ms > 0
    assert evidence.wall_ms > 0
    assert 0 <= evidence.regret_bound < math.inf
    assert choice.relative_error < ALLOWED
    assert 0 < choice.time_ms < 100
    assert first.text in ways(choice), "what served first is one of the candidates"
    assert len(set(ways(choice))) == len(ways(choice))
    assert ca.Selection.from_json(choice.selection.to_json()) == choice.selection
    # Decided: the same one from here on, and the same bits.
    before = call(name, input, weight)
    for _ in range(3):
        assert torch.equal(call(name, input, weight), before)
    assert_close(before, right, ALLOWED, "after the decision")
    assert ca.choices() == [choice]
    assert TUNER.undecided == 0


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], list[str]]:
    """(numbers of checks that fail, texts that were checked so far)"""
    numbers: set[int] = set()
    asked: list[str] = []
    real = checking.begin

    def begin(problem: ca.ConvProblem, text: str, *rest: Any) -> OutputCheck:
        asked.append(text)
        return OutputCheck(0.7) if len(asked) - 1 in numbers else real(problem, text, *rest)

    monkeypatch.setattr(checking, "begin", begin)
    return numbers, asked


def test_the_next_best_takes_a_wrong_ones_place(wrong: tuple[set[int], list[str]]) -> None:
    """What fails the check never serves a call, and the choice says so."""
    numbers, asked = wrong
    numbers.add(1)
    input, weight = operands()
    converge(lambda: call("dense", input, weight))
    (choice,) = ca.choices()
    assert len(asked) > 2
    assert choice.rejected == ((asked[1], 0.7),)
    assert asked[1] not in ways(choice)


@pytest.mark.parametrize("name", ["dense", "grouped"])
def test_a_synchronisation_elsewhere_never_fails(name: str) -> None:
    """cuDNN captures a stream of its own in a heuristic query: that belongs on the caller's thread.
    While threads compile, a synchronisation must succeed too."""
    for seed in range(20):
        ca.forget()
        input, weight = operands(name, seed)
        weight = weight[: 8 * (1 + seed % 4)].contiguous(memory_format=NHWC)
        if name == "grouped":
            input = input[: 1 + seed % 8].contiguous(memory_format=NHWC)
            weight = operands(name, seed)[1]
        for _ in range(60):
            call(name, input, weight)
            torch.cuda.synchronize()
            time.sleep(0.001)  # the threads have their turn


def transposed(input: Tensor, weight: Tensor) -> Tensor:
    """A transposed convolution, which is tuned as the gradient of an input."""
    return ca.functional.conv_transpose2d(input, weight, padding=1, sampling="online")


def right_transposed(input: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.conv_transpose2d(
        input.cpu().double(), weight.cpu().double(), padding=1
    )


def compiled() -> set[str]:
    """The engines that cuDNN compiles at run time for it and that are not seldom the fastest, of
    those that build."""
    input_shape, weight_shape, options = LAYERS["dense"]
    problem = ca.ConvProblem(
        "dgrad", input_shape, weight_shape, **options, dtype=torch.float16, memory_format=NHWC
    )
    listed = ca.expert.candidates(problem, device="cuda")
    some = [c for c in listed if c.engine is not None and c.is_compiled]
    some = [c for c in some if not is_seldom_fastest(c, problem)]
    built = open_search(problem).build_many([c.text for c in some], 4)
    found = {c.engine_name for c, (plan, _) in zip(some, built, strict=True) if plan is not None}
    return found or pytest.skip("no engine for it is compiled at run time")


def took_part(choice: ca.Choice) -> set[str]:
    """The engines compiled at run time that took turns, and all whose output was wrong."""
    measured = (m.candidate for m in choice.selection.ranking)
    rejected = {text.partition(":")[0] for text, _ in choice.rejected}
    return {c.engine_name for c in measured if c.is_compiled} | rejected


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the threads that have compiled a plan."""
    threads: list[str] = []

    def keep(problem: str, engine: str, gpu: object, data: bytes) -> None:
        threads.append(threading.current_thread().name)

    _C.keep_plans("RUNTIME_COMPILATION", lambda *name: None, keep)
    yield threads
    _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)


def test_what_is_compiled_takes_part_and_no_call_compiles(compilations: list[str]) -> None:
    wanted = compiled()
    compilations.clear()
    input, weight = operands()
    right = right_transposed(input, weight)
    calls = 0

    def once() -> None:
        nonlocal calls
        output = transposed(input, weight)
        calls += 1
        if calls % 50 == 1:
            assert_close(output, right, ALLOWED)

    converge(once)
    (choice,) = ca.choices()
    assert wanted <= took_part(choice)
    assert len(compilations) >= len(wanted)
    assert set(compilations) == {"cudnn_autotune-background"}
    assert_close(transposed(input, weight), right, ALLOWED)


def test_training_step() -> None:
    input, weight = operands()
    exact_input, exact_weight = (t.cpu().double().requires_grad_() for t in (input, weight))
    exact = torch.nn.functional.conv2d(exact_input, exact_weight, padding=1)
    seed = torch.randn(exact.shape).half()
    right = torch.autograd.grad(exact, (exact_input, exact_weight), seed.double())
    mine = (input.requires_grad_(), weight.requires_grad_())
    seed = seed.cuda().contiguous(memory_format=NHWC)

    def step() -> tuple[Tensor, ...]:
        output = call("dense", *mine)
        return (output, *torch.autograd.grad(output, mine, seed))

    def check(results: tuple[Tensor, ...]) -> None:
        for what, actual, wanted in zip(
            ("output", "dgrad", "wgrad"), results, (exact, *right), strict=True
        ):
            assert_close(actual, wanted, ALLOWED, what)

    calls = 0

    def once() -> None:
        nonlocal calls
        results = step()
        calls += 1
        if calls % 50 == 1:
            check(results)

    converge(once)
    check(step())
    made = ca.choices()
    assert {c.problem.op for c in made} == {"fprop", "dgrad", "wgrad"}
    assert all(c.total_samples > 0 for c in made)


@pytest.mark.usefixtures("undecided")
def test_no_call_waits_for_the_gpu() -> None:
    input, weight = operands()
    right = expected("dense", input, weight)
    once = functools.partial(call, "dense", input, weight)
    once()
    until(lambda: TUNER.preparing == 0, once, "all built and checked")
    for _ in range(200):  # every kernel is loaded: that may wait, whoever runs it
        once()
    torch.cuda.synchronize()
    assert TUNER.undecided == 1
    over = torch.cuda.Event()
    # More calls than there are events, and few enough for CUDA's queue.
    torch.cuda._sleep(2_000_000_000)  # a second and more
    over.record()
    outputs = [call("dense", input, weight) for _ in range(100)]
    is_over = over.query()
    torch.cuda.synchronize()
    assert not is_over, "a call waited until the GPU was free"
    for output in outputs:
        assert_close(output, right, ALLOWED)
    # And the trial goes on.
    assert_close(call("dense", input, weight), right, ALLOWED)


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", LAYERS)
def test_no_check_waits_for_the_gpu(name: str) -> None:
    input, weight = operands(name)
    once = functools.partial(call, name, input, weight)
    once()
    until(lambda: TUNER.preparing == 0, once, "every kernel is loaded: that may wait")
    ca.forget()
    torch.cuda.synchronize()
    once()
    over = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # a second and more
    over.record()
    outputs = [once() for _ in range(12)]  # lists the candidates, and begins the first checks
    is_over = over.query()
    torch.cuda.synchronize()
    assert not is_over, "a call waited until the GPU was free"
    assert TUNER.preparing == 1
    for output in outputs:
        assert_close(output, expected(name, input, weight), ALLOWED)


def test_capture_in_mid_trial() -> None:
    input, weight = operands()
    seen = 0

    def once() -> None:
        nonlocal seen
        call("dense", input, weight)
        seen += 1

    once()
    until(lambda: seen >= 40, once, "some turns")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call("dense", input, weight)

    def check() -> None:
        for seed in (1, 2):
            fresh, _ = operands("dense", seed)
            saved = input.clone()
            input.copy_(fresh)
            output.fill_(math.nan)
            graph.replay()
            assert_close(output, expected("dense", input, weight), ALLOWED, f"replay {seed}")
            input.copy_(saved)

    check()
    converge(once)
    check()  # the captured one may have lost, and its plan is gone from the trial
    ca.forget()
    gc.collect()
    check()


def test_a_decided_trial_ends_in_a_capture() -> None:
    """The call that finds it decided frees its plans, and unloads kernels that were compiled."""
    input, weight = operands()
    transposed(input, weight)
    converge(lambda: transposed(input, weight))
    (choice,) = ca.choices()
    assert any(m.candidate.is_compiled for m in choice.selection.ranking)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = transposed(input, weight)
    output.fill_(math.nan)
    graph.replay()
    assert_close(output, right_transposed(input, weight), ALLOWED)


def test_capture_while_a_trial_is_prepared() -> None:
    """In CUDA's default mode another thread's allocation or module load breaks a capture."""
    input, weight = operands()
    weights = [weight[:k].contiguous(memory_format=NHWC) for k in (8, 16, 24)]
    other = torch.randn(64, 64, device="cuda")
    (other @ other).sum().item()
    for part in weights:
        for _ in range(2):  # from the second call on each one does a piece of it
            call("dense", input, part)
    captures = 0
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = other @ other
            time.sleep(0.05)
            result = result + 1
        graph.replay()
        captures += 1
        for part in weights:
            call("dense", input, part)
    assert captures > 5
    assert_close(result, other.cpu().double() @ other.cpu().double() + 1, 1e-2)
    for part in weights:
        assert_close(call("dense", input, part), expected("dense", input, part), ALLOWED)


def test_two_threads_with_one_problem_agree() -> None:
    pairs = [operands("dense", seed) for seed in (0, 1)]
    right = [expected("dense", *pair) for pair in pairs]
    torch.cuda.synchronize()
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)
    finals: list[Tensor] = [torch.empty(0), torch.empty(0)]

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait(timeout=60)
                deadline = time.monotonic() + MOST_S
                calls = 0
                while calls < 200 or (TUNER.undecided and time.monotonic() < deadline):
                    output = call("dense", *pairs[index])
                    calls += 1
                    if calls % 50 == 1:
                        torch.cuda.current_stream().synchronize()
                        assert_close(output, right[index], ALLOWED)
                barrier.wait(timeout=120)
                for _ in range(130):  # each looks now and then what the other has decided
                    call("dense", *pairs[index])
                barrier.wait(timeout=60)
                finals[index] = call("dense", *pairs[0])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=180)
        assert not thread.is_alive(), "deadlock"
    assert not errors, errors
    assert TUNER.undecided == 0
    (choice,) = ca.choices()
    assert choice.total_samples > 0
    if "NONDETERMINISTIC" not in choice.chosen.candidate.notes:
        assert torch.equal(*finals), "two threads, two choices"


def test_a_thread_that_ends_takes_its_trial_with_it() -> None:
    input, weight = operands()
    torch.cuda.synchronize()

    def work() -> None:
        for _ in range(3):
            call("dense", input, weight)
        torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    deadline = time.monotonic() + 30
    while TUNER.undecided and time.monotonic() < deadline:
        time.sleep(0.02)
    assert TUNER.undecided == 0
    assert_close(call("dense", input, weight), expected("dense", input, weight), ALLOWED)


def test_side_stream() -> None:
    input, weight = operands()
    right = expected("dense", input, weight)
    late = torch.zeros_like(input)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for calls in range(100):
            torch.cuda._sleep(200_000)
            late.copy_(input)
            output = call("dense", late, weight)
            late.zero_()
            if calls % 20 == 0:
                assert_close(output, right, ALLOWED, f"call {calls}")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.3])
def test_a_process_may_end_in_mid_trial(pause_s: float, groups: int) -> None:
    """Plans, events and threads, of which some compile, are there when the interpreter goes."""
    code = f"""
import time, torch, cudnn_autotune as ca
options = dict(device="cuda", dtype=torch.half)
x = torch.randn(8, 32, 28, 28, **options).to(memory_format=torch.channels_last)
w = torch.randn(32, 32 // {groups}, 3, 3, **options).to(memory_format=torch.channels_last)
for _ in range(5):
    ca.functional.conv2d(x, w, padding=1, groups={groups}, sampling="online")
time.sleep({pause_s})
print("end")
"""
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout.strip()) == (0, "end"), ended.stderr
    assert "terminate" not in ended.stderr
