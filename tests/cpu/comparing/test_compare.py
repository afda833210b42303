"""``compare`` measures each way in a process of its own, and a way that fails spoils no other."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkout
from support.models import compared_models
from support.processes.subprocesses import PACKAGE_PARENT, python
from support.store.stored import run
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.comparing import compare, ways
from cudnn_autotune.comparing.result import ModelComparison, Row

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).expand(2, 3, 8, 8)


def compared(model: nn.Module, *names: str, **options: Any) -> dict[str, Row]:
    found = ca.compare(model, X, ways=names, **options)
    assert not found.was_interrupted
    return {row.way: row for row in found.rows}


@pytest.mark.slow
def test_a_training_step_in_each_way_that_a_cpu_has() -> None:
    model = compared_models.Moves().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = ca.compare(model, X, ways=["eager", "channels_last", "convert"])
    eager, last, convert = found.rows
    for row in (eager, last):
        assert row.step_ms is not None
        assert row.first_call_s > 0
        assert row.spread is not None
        assert row.peak_mib is None
        assert row.output_error < 1e-5
        assert row.gradient_error < 1e-4
    assert eager.speedup == 1
    assert last.speedup == pytest.approx(eager.step_ms / last.step_ms)
    assert last.code == ("model = model.to(memory_format=torch.channels_last)",)
    assert (convert.step_ms, convert.note) == (None, ways.WAYS["convert"].only_on_gpu)
    assert found.fastest in (eager, last)
    assert found.subject == "Moves, forward + backward, 2x3x8x8 float32, cpu"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (compared_models.Dies, "ended with exit code 3: the end comes here"),
        pytest.param(
            compared_models.TooLarge,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate",
            marks=pytest.mark.slow,
        ),
        pytest.param(compared_models.Hangs, "no answer within 15 s", marks=pytest.mark.slow),
    ],
)
def test_a_way_that_fails_says_why_and_the_others_stay(model: type[nn.Module], reason: str) -> None:
    rows = compared(model().eval(), "eager", "channels_last", time_limit_s=15)
    assert rows["eager"].step_ms is not None
    assert rows["eager"].output_error < 1e-5
    assert rows["channels_last"].step_ms is None
    assert reason in rows["channels_last"].note


def test_what_cannot_be_sent_to_a_process_is_measured_here() -> None:
    model = compared_models.Here().eval()
    found = ca.compare(model, X, ways=["eager", "channels_last"])
    assert [row.output_error for row in found.rows] == pytest.approx([0, 0], abs=1e-5)
    (note,) = found.notes
    assert "measured in this process" in note
    assert "Can't pickle local object" in note
    assert model.norm.num_batches_tracked == 0


def test_an_interrupt_while_the_ways_end_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def close(self: compare._Here) -> None:
        closed.append(self)
        if len(closed) == 2:  # the first is float32's
            raise KeyboardInterrupt

    monkeypatch.setattr(compare._Here, "close", close)
    found = ca.compare(compared_models.Here().eval(), X, ways=["eager", "channels_last"])
    assert found.was_interrupted
    assert all(row.step_ms is not None for row in found.rows)
    assert len(set(closed)) == 3


def test_random_numbers_of_the_caller_go_on() -> None:
    model = compared_models.Here().eval()
    before = torch.get_rng_state()
    ca.compare(model, X, ways=["eager"])
    assert torch.equal(torch.get_rng_state(), before)


def test_an_output_that_overflows_is_told() -> None:
    model = compared_models.Overflows().eval()
    (row,) = ca.compare(model, torch.ones(2, dtype=torch.float16), ways=["eager"]).rows
    assert row.output_error is None
    assert row.note == "its outputs are not finite, unlike those in float32"


@pytest.mark.slow
def test_a_process_has_the_callers_tf32(cudnn_flags: Any) -> None:
    cudnn_flags(allow_tf32=False)
    with pytest.raises(ValueError, match="it raises ValueError: allow_tf32 is False"):
        ca.compare(compared_models.SaysTF32().eval(), X, ways=["eager"])


PRECISE = """
import torch, cudnn_autotune as ca
from support.models import compared_models

torch.backends.cudnn.conv.fp32_precision = "ieee"  # by the newer names alone
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.depthwise_kernel = "native"
model = compared_models.SaysSettings(FILE).eval()
(row,) = ca.compare(model, torch.randn(2, 3, 9, 9), ways=["eager"]).rows
print(row.note, row.output_error)
print(torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
"""


@pytest.mark.slow
def test_processes_have_the_callers_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    program = PRECISE.replace("FILE", repr(str(path)))
    done = python("-c", program, cwd=checkout.TESTS)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "('ieee', 'tf32', torch.float64, True, 'native')"
    error, after = done.stdout.splitlines()
    assert float(error) < 1e-6
    assert after == "ieee tf32"


def test_a_wrong_output_has_a_large_error() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert ways.relative_error([zeros], [ones]) == 1
    assert ways.relative_error([ones, 2 * ones], [ones, ones]) == pytest.approx(0.5**0.5)
    assert ways.relative_error([ones / 0], [ones]) is None
    assert ways.relative_error([ones], [torch.ones(4)]) is None


MAIN = """
import sys
import torch, cudnn_autotune as ca
from torch import nn

class Own(nn.Conv2d):
    pass

GUARD
    print(ca.compare(Own(3, 4, 3).eval(), torch.randn(2, 3, 9, 9), ways=["eager"]))
"""


@pytest.mark.slow
def test_a_model_of_a_script(tmp_path: Path) -> None:
    """Its class is the main module's; without a guard it cannot be imported there."""
    for guard, is_here in (('if __name__ == "__main__":', False), ("if True:", True)):
        (tmp_path / "script.py").write_text(MAIN.replace("GUARD", guard))
        done = python("script.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Own, forward, 2x3x9x9 float32, cpu")
        assert ("measured in this process" in done.stdout) is is_here
        assert ("needs `if __name__" in done.stdout) is is_here


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ways": ["eager", "fast"]}, "ways must be some of eager, .*, each once, got"),
        ({"ways": []}, "ways must be some of"),
        ({"autocast": torch.float32}, "autocast must be None, torch.float16 or bfloat16"),
        ({"time_limit_s": 0}, "time_limit_s must be a number above 0, got 0"),
        ({"time_limit_s": None}, "time_limit_s must be a number above 0, got None"),
        ({"ways": [["eager"]]}, "ways must be some of"),
        ({"ways": "bakend"}, r"got \['bakend'\]; did you mean 'backend'\?"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ca.compare(compared_models.Net(), X, **change)


def test_bad_types_and_models_are_named() -> None:
    with pytest.raises(TypeError, match=r"ways must be some of eager, .*, got 3"):
        ca.compare(compared_models.Net(), X, ways=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a torch"):
        ca.compare(len, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lazy parameters"):
        ca.compare(nn.LazyConv2d(3, 3), X)
    with pytest.raises(ValueError, match="must not be compiled already"):
        ca.compare(torch.compile(compared_models.Net()), X)
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        ca.compare(compared_models.Net(), X.to("meta"))


def test_bad_inputs_are_named() -> None:
    net = compared_models.Net()
    with pytest.raises(TypeError, match=r"inputs must be .* Net\.forward\(x: .*missing a required"):
        ca.compare(net)
    with pytest.raises(TypeError, match="too many positional arguments"):
        ca.compare(net, X, X)
    with pytest.raises(ValueError, match="inputs must be what Here takes, and it raises TypeError"):
        ca.compare(compared_models.Here(), "x", ways="eager")


def test_whether_to_train_is_a_bool() -> None:
    with pytest.raises(TypeError, match="train must be a bool or None, got str"):
        ca.compare(compared_models.Net(), X, train="yes")  # type: ignore[arg-type]


def test_a_model_that_learns_nothing_names_train() -> None:
    frozen = compared_models.Net().requires_grad_(False)
    with pytest.raises(ValueError, match=r"^train must be False: no output of the model"):
        ca.compare(frozen, X, ways="eager")


def test_a_time_limit_may_be_infinite() -> None:
    (row,) = compared(compared_models.Net(), "eager", time_limit_s=float("inf")).values()
    assert row.step_ms is not None


@pytest.mark.parametrize("dims", [(2,), (3,), (1, 2, 3)], ids=str)
def test_the_lines_for_channels_last_run(dims: tuple[int, ...]) -> None:
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    model = nn.ModuleList(kinds[n](4, 4, 3) for n in dims)
    lines = ways.code_of("channels_last", False, False, model)
    exec("\n".join(lines), {"torch": torch, "model": model})
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in (layer.weight for layer in model):
        last = formats.get(weight.dim(), torch.contiguous_format)
        assert weight.is_contiguous(memory_format=last)


def test_one_way_may_be_named_alone() -> None:
    (row,) = ca.compare(compared_models.Here().eval(), X, ways="eager").rows
    assert row.step_ms is not None


def made_up(**changes: Any) -> ModelComparison:
    rows = (
        Row("eager", (), 12.0, 0.01, 1.0, 1.5, 800.0, 1e-3, None),
        Row("compile", ("<a>",), 10.0, 0.01, 1.2, 30.0, 700.0, 1e-3, None),
        Row("backend", ("model = ...",), 8.0, 0.01, 1.5, 40.0, 701.0, 1e-3, None),
        Row("convert", ("[b]",), note="out of <memory>"),
    )
    return replace(ModelComparison("Net", rows), **changes)


def test_the_verdict_names_the_fastest_and_by_how_much() -> None:
    found = made_up()
    assert found.verdict == "fastest: backend, 1.25 times as fast as PyTorch's best, compile"
    theirs = made_up(rows=(*found.rows[:2], replace(found.rows[2], step_ms=11.0)))
    assert "fastest: compile, 1.10 times as fast as this package's best, backend" in theirs.verdict
    assert made_up(rows=found.rows[:1]).verdict == "fastest: eager"
    noisy = (replace(found.rows[0], spread=0.3), *found.rows[1:])
    assert made_up(rows=noisy[:2]).verdict == (
        "fastest: compile; by the spread of their times it may as well be eager"
    )
    assert made_up(rows=noisy).verdict == found.verdict  # 8 ms is further from 12 than 3.7
    assert made_up(rows=found.rows[3:]).verdict == "no way could be measured"


def test_no_way_is_the_fastest_if_ctrl_c_left_some_out() -> None:
    """A way that failed is not left out."""
    begun = made_up(was_interrupted=True)
    assert begun.verdict == made_up().verdict
    left = [replace(row, step_ms=None) for row in begun.rows[1:3]]
    found = made_up(rows=(begun.rows[0], *left, begun.rows[3]), was_interrupted=True)
    assert found.fastest is None
    assert found.verdict == (
        "interrupted before these were measured, so the fastest is not known: compile, backend"
    )
    assert "<a>" not in str(found)
    assert "12" in str(found)


def test_calibrating_gives_norms_their_inputs_statistics() -> None:
    model = compared_models.Net().eval()
    ways.calibrate(model, [X])
    assert model.norm.momentum == 0.1
    assert not model.norm.training
    output = model.conv(X).detach()
    assert torch.allclose(model.norm.running_mean, output.mean((0, 2, 3)), atol=1e-6)


NET = ("compare", "support.models.compared_models:Here", "--input", "2,3,8,8", "--device", "cpu")


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a" / "b.json", "--html", tmp_path / "b.html")
    done = run(*NET, "--dtype", "bfloat16", "--ways", "eager,channels_last", *files)
    assert done.exit_code == 0, done.output
    assert done.stderr == "comparing eager, channels_last; each may take 300 s to be ready\n"
    text = " ".join(done.stdout.split())
    assert text.startswith(
        "support.models.compared_models:Here: Here, forward, 2x3x8x8 bfloat16, cpu"
    )
    assert "way step, ms spread speed first call, s error, output eager " in text  # tabs: a pipe
    assert "fastest: " in text
    tree = json.loads((tmp_path / "a" / "b.json").read_text())
    assert [row["way"] for row in tree["rows"]] == ["eager", "channels_last"]
    assert 1e-4 < tree["rows"][0]["output_error"] < 1e-1  # bfloat16's
    page = (tmp_path / "b.html").read_text()
    assert ">channels_last</td>" in page
    assert ">way</th>" in page
    assert page.count('<div style="width:') == 2
    here = ca.environment()
    for name in ("torch", "cuDNN", "GPU", "date", "command"):
        assert f">{name}</td>" in page
    assert here["torch"] in page
    again = run(*NET, "--html", tmp_path / "b.html")
    assert again.exit_code == 2
    assert "'--html'" in again.stderr
    assert "is there already; --force replaces it" in again.stderr
    assert (tmp_path / "b.html").read_text() == page


@pytest.mark.slow
@pytest.mark.parametrize(("said", "is_replaced"), [("n", False), ("y", True)])
def test_a_terminal_is_asked_before_a_file_is_replaced(
    tmp_path: Path, said: str, is_replaced: bool
) -> None:
    page = tmp_path / "a.html"
    page.write_text("mine")
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{said}\n".encode())
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cudnn_autotune_cli", *NET, "--ways", "eager", "--html", page],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([PACKAGE_PARENT, str(checkout.TESTS)]),
            },
            cwd=checkout.TESTS,
            stdin=terminal,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert "is there already. Replace it?" in done.stdout
    assert (done.returncode == 0) is is_replaced, done.stderr
    assert (page.read_text() == "mine") is not is_replaced


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        ("pair", (), "fastest: eager"),
        ("pair", ("--input", "2,3,8,8"), "returns the inputs"),
        ("Here", (), "is a model without inputs"),
        (
            "Here",
            ("--input", "2,3,8"),
            ":Here with --input 2,3,8: ValueError: inputs must be what Here takes, and it raises "
            "RuntimeError",
        ),
    ],
)
def test_a_callable_may_return_inputs(made: str, given: Sequence[str], said: str) -> None:
    name = f"support.models.compared_models:{made}"
    done = run("compare", name, *given, "--device", "cpu", "--ways", "eager")
    assert said in done.stdout + done.stderr
    assert (done.exit_code == 0) is (given == () and made == "pair")


def test_the_command_of_a_model_that_fails() -> None:
    """Its error is told once, and compilers are not tried."""
    ways = "channels_last,compile,max-autotune"
    done = run("compare", "support.models.compared_models:Fails", *NET[2:], "--ways", ways)
    assert done.exit_code == 1
    assert "inputs must be what Fails takes" in done.stderr
    assert "it raises ValueError: no such size: (2, 3, 8, 8)" in done.stderr


INTERRUPTED = """
import _thread, signal, sys
from support.models import compared_models
from cudnn_autotune.comparing import compare
from cudnn_autotune_cli import main

asked = compare._Measurement._ask

def ask(self, name, task, case=None):
    if name == "channels_last":
        _thread.interrupt_main()
    return asked(self, name, task, case)

compare._Measurement._ask = ask
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_ctrl_c_shows_and_keeps_what_was_measured(tmp_path: Path) -> None:
    given = ("support.models.compared_models:Net", *NET[2:], "--ways", "eager,channels_last")
    path = tmp_path / "a.json"
    tests = checkout.TESTS
    command = ("-c", INTERRUPTED, "compare", *given, "--json", str(path))
    done = python(*command, env={"PYTHONPATH": str(tests)}, cwd=tests)
    assert done.returncode == 130, done.stderr
    assert "interrupted: times are of what had run until then" in done.stdout
    assert "Traceback" not in done.stderr
    tree = json.loads(path.read_text())
    assert tree["was_interrupted"] is True
    assert tree["rows"][0]["step_ms"] > 0
    assert tree["rows"][1]["step_ms"] is None
    left = "interrupted before these were measured, so the fastest is not known: channels_last"
    assert tree["verdict"] == left
    assert left in done.stdout


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


API = """
import sys, torch
from support.models import compared_models
import cudnn_autotune as ca
model = getattr(compared_models, sys.argv[1])().eval()
ca.compare(model, torch.randn(2, 3, 8, 8), ways=["eager"])
print("not reached")
"""


def _heeds_signals() -> None:
    """A shell's background job ignores SIGINT, and a program under nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "program"),
    [
        pytest.param(signal.SIGTERM, "command", marks=pytest.mark.slow),
        (signal.SIGHUP, "measured"),
        (signal.SIGTERM, "function"),
        pytest.param(signal.SIGINT, "command", marks=pytest.mark.slow),
        (signal.SIGKILL, "command"),
    ],
)
def test_a_signal_ends_what_was_started(
    tmp_path: Path, number: signal.Signals, program: str
) -> None:
    """A model that never returns, and a process of its own: all end, and their folders go."""
    tests, temporary, called = (
        checkout.TESTS,
        tmp_path / "tmp",
        tmp_path / "c",
    )
    temporary.mkdir()
    model = "StuckOfChannelsLast" if program == "measured" else "Stuck"
    given = [f"support.models.compared_models:{model}", *NET[2:], "--ways", "eager,channels_last"]
    command = ["-m", "cudnn_autotune_cli", "compare", *given]
    path = os.pathsep.join([PACKAGE_PARENT, str(tests)])
    process = subprocess.Popen(
        [sys.executable, *(["-c", API, model] if program == "function" else command)],
        env={**os.environ, "TMPDIR": str(temporary), "STUCK": str(called), "PYTHONPATH": path},
        cwd=tests,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_heeds_signals,
    )
    try:
        deadline = time.monotonic() + 240
        while not called.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        worker, child = map(int, called.read_text().split())
        assert is_running(worker)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGKILL:  # nothing of ours can run then
        os.kill(child, signal.SIGKILL)
        return
    assert not is_running(child)
    assert list(temporary.iterdir()) == []
    if program == "function":
        assert printed == ""
        return
    assert "interrupted: times are of what had run until then" in printed
    left = "channels_last" if program == "measured" else "eager, channels_last"
    assert f"measured, so the fastest is not known: {left}\n" in printed


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (compared_models.ReturnsNone, "the model returns no tensor of floating-point numbers"),
        (compared_models.ReturnsIntegers, "the model returns no tensor of floating-point numbers"),
        (compared_models.Divides, "the model's outputs are not finite in float32"),
        (compared_models.Grows, "the shapes of the model's outputs change from call to call"),
        (compared_models.Draws, "the model draws random numbers, or keeps a state"),
    ],
)
def test_why_errors_are_not_known(model: type[nn.Module], reason: str) -> None:
    found = ca.compare(model().eval(), X, ways=["eager"])
    assert found.rows[0].step_ms is not None
    assert found.rows[0].output_error is None
    assert any(f"errors are not known: {reason}" in note for note in found.notes), found.notes


def test_what_a_model_raises_controls_no_terminal(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    name = "support.models.compared_models:Colours"
    done = run("compare", name, *NET[2:], "--ways", "eager,channels_last", *files)
    html = (tmp_path / "a.html").read_text(encoding="utf-8")
    notes = "".join(row["note"] for row in json.loads((tmp_path / "a.json").read_text())["rows"])
    refused = run("compare", name, *NET[2:], "--ways", "channels_last", "--channels-last").stderr
    for text in (done.stdout, done.stderr, html, notes, refused):
        assert "".join(text.split()).isprintable()
    for text in (done.stdout, html, notes, refused):
        assert "ValueError: \ufffd[31mred\ufffd]0;title" in text


@pytest.mark.slow
def test_a_compiled_step_is_compared() -> None:
    rows = compared(compared_models.Net().train(), "eager", "compile", autocast=torch.bfloat16)
    row = rows["compile"]
    assert row.step_ms is not None, row.note
    assert 1e-5 < row.gradient_error < 0.3  # the norm's backward cancels most of a gradient
    assert row.first_call_s > rows["eager"].first_call_s
