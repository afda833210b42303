"""``cudnn-autotune tune``: real sampling modes on simulated GPUs, into real stores."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.simulation import SimulatedTimer, preset
from support.store.stored import H200, decide, layer, refused, run, succeeded
from torch import nn

from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.commands.tune import Bench
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.models.tuning import Progress
from cudnn_autotune.nn.modules import Conv2d
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
LAYER = ("--input", "16,64,28,28", "--weight", "64,64,3,3", "--padding", "1")
# A scene for each operation, so that they differ.
SCENES = {"fprop": "quiet", "dgrad": "h200-capped", "wgrad": "depthwise"}

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.again = nn.Conv2d(8, 8, 3, padding=1, groups=2)

    def forward(self, x, y=None):
        return self.again(self.second(self.first(x))).relu()


class Small:
    net = Net


class Own(nn.Conv2d):
    sampling = "of another kind"


class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList([Own(8, 8, 1), Own(8, 8, 3)])


class Volume(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv3d(4, 6, 3, padding=1), nn.ConvTranspose3d(6, 4, 2, stride=2))


made = Net()
number = 3


def pair():
    return Net(), torch.zeros(4, 3, 12, 12)


def keywords():
    return Net(), {"x": torch.zeros(4, 3, 12, 12)}

def fails():
    raise KeyError("no such size")


def leaves():
    raise SystemExit(3)


def text():
    return "not a model"
"""


def calls_of(model: nn.Module, *inputs: torch.Tensor) -> Counter[ConvProblem]:
    """Of convolutions on the CPU, where the package's own has none; in the order of the calls."""
    found: list[ConvProblem] = []

    def note(module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert type(module) is Conv2d
        x = given[0]
        nhwc = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        for op in ("fprop", "dgrad", "wgrad") if torch.is_grad_enabled() else ("fprop",):
            if op != "dgrad" or x.requires_grad:
                found.append(
                    ConvProblem(
                        op,
                        x.shape,
                        module.weight.shape,
                        padding=module.padding,
                        groups=module.groups,
                        dtype=x.dtype,
                        memory_format=torch.channels_last if nhwc else torch.contiguous_format,
                    )
                )

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert hooks
    model(*inputs)
    return Counter(found)


class Simulated:
    """Counts what it is asked to tune."""

    def __init__(self, timer: Callable[[str], SimulatedTimer] = preset) -> None:
        self.tuned: list[tuple[ConvProblem, str]] = []
        self._timer = timer

    def __call__(self, problem: ConvProblem, mode: str) -> Decision:
        self.tuned.append((problem, mode))
        timer = self._timer(SCENES[problem.op])
        return decide(problem, timer, timer.candidates, mode)

    @property
    def bench(self) -> Bench:
        return Bench(H200, torch.device("cpu"), self, calls_of)


@pytest.fixture
def gpu() -> Simulated:
    return Simulated()


def kept(place: Path) -> dict[ConvProblem, Decision]:
    return {decision.problem: decision for decision in Store(place, H200)}


def test_a_layer(gpu: Simulated, tmp_path: Path) -> None:
    given = (*LAYER, "--dtype", "float16", "--channels-last", "--store", tmp_path)
    text = succeeded("tune", *given, obj=gpu.bench)
    wanted = [layer(op) for op in ("fprop", "dgrad", "wgrad")]
    assert gpu.tuned == [(problem, "auto") for problem in wanted]
    found = kept(tmp_path)
    assert list(found) == wanted
    for problem, decision in found.items():
        line = f"{problem.op} 16×64×28×28, 64 of 3×3, padding 1: {decision.chosen.candidate.text}, "
        assert line in text
    assert "3 problems, 3 of them timed" in text
    assert "tuned in" in text.rpartition("fprop + dgrad + wgrad: ")[2]
    assert str(tmp_path / H200.file_name) in text.replace(" ", "")  # it may fill a line


def test_what_the_store_knows_is_not_tuned_again(gpu: Simulated, tmp_path: Path) -> None:
    given = ("tune", *LAYER, "--dtype", "float16", "--channels-last", "--store", tmp_path)
    succeeded(*given, "--op", "fprop", obj=gpu.bench)
    first = kept(tmp_path)
    gpu.tuned.clear()
    text = succeeded(*given, obj=gpu.bench)
    assert [problem.op for problem, _ in gpu.tuned] == ["dgrad", "wgrad"]
    assert text.count("known already") == 2  # its line, and the title
    assert kept(tmp_path)[layer("fprop")] == first[layer("fprop")]
    gpu.tuned.clear()
    succeeded(*given, "--retune", "--op", "fprop", "--op", "wgrad", obj=gpu.bench)
    assert [problem.op for problem, _ in gpu.tuned] == ["fprop", "wgrad"]


def test_geometry(gpu: Simulated, tmp_path: Path) -> None:
    given = ("--input", "2,8,9,11", "--weight", "6,4,3,5", "--stride", "2,1", "--padding", "1,2")
    more = ("--dilation", "1,2", "--groups", "2", "--op", "wgrad", "--store", tmp_path)
    succeeded("tune", *given, *more, obj=gpu.bench)
    assert gpu.tuned[0][0] == ConvProblem(
        "wgrad", (2, 8, 9, 11), (6, 4, 3, 5), (2, 1), (1, 2), (1, 2), 2
    )
    for padding in ("same", "valid"):
        given = ("--input", "2,8,9", "--weight", "6,8,4", "--padding", padding, "--op", "fprop")
        succeeded("tune", *given, "--store", tmp_path, obj=gpu.bench)
        assert gpu.tuned[-1][0] == ConvProblem("fprop", (2, 8, 9), (6, 8, 4), padding=padding)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, with a user's module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_nets.py").write_text(MODEL)
    (tmp_path / "my_script.py").write_text("raise SystemExit(2)\n")
    (tmp_path / "my_pkg").mkdir()
    for name in ("__init__", "models"):
        (tmp_path / "my_pkg" / f"{name}.py").touch()
    (tmp_path / "my_pkg" / "uses.py").write_text("import my_net\n")
    yield tmp_path
    for name in ("my_nets", "my_pkg"):
        sys.modules.pop(name, None)


def test_a_model(gpu: Simulated, folder: Path) -> None:
    given = ("tune", "my_nets:Net", "--input", "4,3,12,12", "--store", folder / "store")
    succeeded(*given, obj=gpu.bench)
    tuned = [problem for problem, _ in gpu.tuned]
    # Two layers alike are one problem.
    assert [(p.op, p.weight_shape) for p in tuned] == [
        ("fprop", (8, 3, 3, 3)),
        ("fprop", (8, 4, 3, 3)),
    ]
    assert {p.dtype for p in tuned} == {torch.float32}
    assert {p.memory_format for p in tuned} == {torch.contiguous_format}
    gpu.tuned.clear()
    more = ("--train", "--dtype", "float64", "--channels-last")
    succeeded(*given, *more, obj=gpu.bench)
    tuned = [problem for problem, _ in gpu.tuned]
    assert [(p.op, p.input_shape[1]) for p in tuned] == [
        ("fprop", 3),
        ("wgrad", 3),
        ("fprop", 8),
        ("dgrad", 8),
        ("wgrad", 8),
    ]
    assert {p.dtype for p in tuned} == {torch.float64}
    assert {p.memory_format for p in tuned} == {torch.channels_last}
    assert len(kept(folder / "store")) == 7


class Together:
    """Tunes the problems of a model together, and stores as it goes."""

    def __init__(self, gpu: Simulated, folder: Path, fails: BaseException | None = None) -> None:
        self.gpu, self.folder, self.fails = gpu, folder, fails
        self.asked: list[tuple[list[int], str, float | None, bool]] = []

    def __call__(
        self,
        calls: Mapping[ConvProblem, int],
        mode: str,
        budget_s: float | None,
        retune: bool,
        report: Callable[[Progress], None],
    ) -> list[Decision]:
        self.asked.append((list(calls.values()), mode, budget_s, retune))
        made = []
        for problem in calls:
            report(Progress(len(made), len(calls), 0.01))
            made.append(self.gpu(problem, mode))
            Store(self.folder, H200).add(made[-1:])
            if self.fails is not None:
                raise self.fails
        return made

    @property
    def bench(self) -> Bench:
        return dataclasses.replace(self.gpu.bench, tune_together=self)


def test_a_model_is_tuned_in_one_race(gpu: Simulated, folder: Path) -> None:
    together = Together(gpu, folder / "store")
    given = ("tune", "my_nets:Net", "--input", "4,3,12,12", "--store", folder / "store")
    text = succeeded(*given, "--budget-s", "5", "--retune", obj=together.bench)
    assert together.asked == [([1, 2], "auto", 5.0, True)]
    assert "2 problems, 2 of them timed" in text
    assert len(kept(folder / "store")) == 2
    # In another mode, or with a budget for each choice, each is tuned by itself.
    for more in (("--sampling", "race"), ("--budget-ms", "100")):
        succeeded(*given, *more, obj=together.bench)
        refused(*given, *more, "--budget-s", "5", obj=together.bench)
    refused("tune", *LAYER, "--budget-s", "5", obj=together.bench)
    assert len(together.asked) == 1


@pytest.mark.parametrize(
    ("fails", "status", "said"),
    [
        (KeyboardInterrupt(), 1, "interrupted; what was decided before is kept in"),
        (RuntimeError("CUDA error: unspecified launch failure"), 1, "the GPU fails; what was"),
    ],
)
def test_a_race_that_breaks_off(
    gpu: Simulated, folder: Path, fails: BaseException, status: int, said: str
) -> None:
    together = Together(gpu, folder / "store", fails)
    given = ("tune", "my_nets:Net", "--input", "4,3,12,12", "--store", folder / "store")
    done = run(*given, obj=together.bench)
    assert done.exit_code == status
    assert said in done.stderr
    assert len(kept(folder / "store")) == 1


@pytest.mark.parametrize("in_one_race", [True, False])
def test_what_was_decided_before_ctrl_c_is_shown(
    gpu: Simulated, folder: Path, in_one_race: bool
) -> None:
    def interrupted(problem: ConvProblem, mode: str) -> Decision:
        if gpu.tuned:
            raise KeyboardInterrupt
        return gpu(problem, mode)

    bench = dataclasses.replace(gpu.bench, tune=interrupted)
    if in_one_race:
        bench = Together(gpu, folder / "store", KeyboardInterrupt()).bench
    given = ("tune", "my_nets:Net", "--input", "4,3,12,12", "--store", folder / "store")
    done = run(*given, obj=bench)
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if "a step by estimate" in line]
    assert line.startswith("my_nets:Net, forward: ")
    # The second problem, which the model calls twice, is not decided.
    assert "its 1 convolution call " in line
    assert "; 2 more not counted" in line
    assert "interrupted; what was decided before is kept in" in done.stderr
    assert len(kept(folder / "store")) == 1
    assert len(json.loads(run(*given, "--json", obj=bench).stdout)["decisions"]) == 1


def test_json(gpu: Simulated, folder: Path) -> None:
    given = ("tune", "my_nets:Mixed", "--input", "4,3,12,12", "--store", folder / "store")
    done = run(*given, "--json", obj=gpu.bench)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [tree["calls"] for tree in found["decisions"]] == [1, 2]
    gains = [tree["gain"] for tree in found["decisions"]]
    theirs = gains[0]["pytorch_ms"] + 2 * gains[1]["pytorch_ms"]
    ours = gains[0]["ours_ms"] + 2 * gains[1]["ours_ms"]
    assert found["gain"]["calls"] == found["gain"]["compared_calls"] == 3
    assert found["gain"]["speedup"] == pytest.approx(theirs / ours)
    assert found["environment"]["gpu"] == H200.gpu
    assert found["path"] == str(folder / "store" / H200.file_name)


def test_what_is_not_served_is_said(gpu: Simulated, folder: Path) -> None:
    given = ("--input", "4,3,12,12", "--store", folder / "store")
    text = succeeded("tune", "my_nets:Mixed", *given, obj=gpu.bench)
    assert (
        "2 convolutions not served by this package: it has an attribute 'sampling' of its own"
        in text
    )
    assert len(gpu.tuned) == 2
    assert "not served" not in succeeded("tune", "my_nets:Net", *given, obj=gpu.bench)


@pytest.mark.parametrize("name", ["pair", "keywords"])
def test_a_callable_may_return_its_inputs(gpu: Simulated, folder: Path, name: str) -> None:
    store = ("--store", folder / "store")
    with_inputs = run("tune", f"my_nets:{name}", *store, "--json", obj=gpu.bench)
    assert with_inputs.exit_code == 0, with_inputs.output
    by_shape = ("--input", "4,3,12,12", *store, "--json")
    known = run("tune", "my_nets:Net", *by_shape, obj=gpu.bench)
    keys = [
        [d["key"] for d in json.loads(done.stdout)["decisions"]] for done in (with_inputs, known)
    ]
    assert keys[0] == keys[1] != []
    refused("tune", "my_nets:pair", *by_shape, obj=gpu.bench)
    assert "'--input': is needed" in refused("tune", "my_nets:Net", *store, obj=gpu.bench)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_package_that_is_missing_is_to_be_installed(
    gpu: Simulated, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(tune_problems, "importlib", SimpleNamespace(import_module=missing))
    said = refused("tune", f"{package}:resnet50", "--input", "1,3,64,64", obj=gpu.bench)
    assert f"install it: pip install {package}" in said


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("resnet50", 2, "must be torchvision:NAME, timm:NAME or MODULE:CALLABLE"),
        (":x", 2, "'MODEL'"),
        ("my_nets:", 2, "'MODEL'"),
        ("no_such_module:x", 2, "cannot import no_such_module"),
        ("my_net:x", 2, "cannot import my_net: No module named 'my_net'; did you mean 'my_nets'?"),
        ("my_nets.py:Net", 2, "did you mean 'my_nets'?"),
        ("my_pkg.model:Net", 2, "did you mean 'my_pkg.models'?"),
        ("my_pkg.models.py:Net", 2, "did you mean 'my_pkg.models'?"),
        ("a folder/my_nets.py:Net", 2, "MODULE is a name as in `import`"),
        ("/a folder/my_nets:Net", 2, "MODULE is a name as in `import`"),
        ("my_nets:absent", 2, "my_nets has no 'absent'"),
        ("my_nets:mode", 2, "my_nets has no 'mode'; did you mean 'made'?"),
        ("my_nets:number", 2, "neither a model nor a callable"),
        ("my_nets:text", 2, "must return a torch.nn.Module or (model, inputs), got str"),
        ("my_nets:fails", 1, "my_nets:fails() fails (my_nets.py, line "),
        ("my_nets:leaves", 1, "my_nets:leaves() fails (my_nets.py, line "),
        ("my_script:x", 1, "my_script fails to import (my_script.py, line 1): SystemExit: 2"),
        ("my_nets:Net", 1, "my_nets:Net with --input 4,5,12,12: RuntimeError"),
    ],
)
def test_models_that_are_none(
    gpu: Simulated, folder: Path, name: str, status: int, said: str
) -> None:
    given = ("--input", "4,5,12,12", "--store", folder / "store")
    assert said in refused("tune", name, *given, status=status, obj=gpu.bench)
    assert gpu.tuned == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent:x", "No module named 'absent'"),
        ("absent.py:x", "No module named 'absent'"),
        ("my_nets.absent:x", "'my_nets' is not a package"),
        ("my_pkg.uses:x", "(uses.py, line 1): No module named 'my_net'"),
    ],
)
def test_nothing_is_proposed_for_a_module_without_a_near_one(
    gpu: Simulated, folder: Path, name: str, said: str
) -> None:
    text = refused("tune", name, "--input", "4,5,12,12", obj=gpu.bench)
    assert said in text
    assert "did you mean" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "'--input': is needed for a layer; a model is named as MODEL"),
        (("--weight", "4,4,3,3"), "'--input'"),
        (("--input", "4,4,8,8"), "'--weight'"),
        (("--input", "4,4,8,8", "--weight", "4,4,3,3", "--memory-format", "auto"), "only with a"),
        (("m:m", "--input", "4,8", "--channels-last", "--memory-format", "auto"), "both layouts"),
        (("--input", "4,4,8", "--weight", "4,4,3,3"), "'--weight'"),
        (("--input", "4,5,8,8", "--weight", "4,4,3,3"), "'--input'"),
        (("--input", "4,x,8,8", "--weight", "4,4,3,3"), "'--input'"),
        (("--input", "4,0,8,8", "--weight", "4,4,3,3"), "'--input'"),
        ((*LAYER, "--input", "4,4,8,8"), "'--input'"),
        ((*LAYER, "--stride", "0"), "'--stride'"),
        ((*LAYER, "--padding", "some"), "'--padding'"),
        ((*LAYER, "--padding", "same", "--stride", "2"), "'--padding'"),
        ((*LAYER, "--groups", "3"), "'--input'"),
        ((*LAYER, "--groups", "0"), "'--groups'"),
        ((*LAYER, "--op", "conv"), "'--op'"),
        ((*LAYER, "--dtype", "int8"), "'--dtype'"),
        ((*LAYER, "--sampling", "best"), "'--sampling'"),
        ((*LAYER, "--sampling", "autoo"), "did you mean 'auto'?"),
        ((*LAYER, "--sampling", "online"), "decides in a program's own calls"),
        ((*LAYER, "--budget-ms", "-1"), "'--budget-ms'"),
        ((*LAYER, "--train"), "--train/--inference"),
        (("my:net", "--input", "4,4,8,8", "--weight", "4,4,3,3"), "'--weight'"),
        (("my:net", "--input", "4,4,8,8", "--op", "fprop"), "'--op'"),
        (("my:net", "--input", "4,4,8,8", "--padding", "1"), "'--padding'"),
    ],
)
def test_bad_input(gpu: Simulated, tmp_path: Path, arguments: Sequence[str], said: str) -> None:
    assert said in refused("tune", *arguments, "--store", tmp_path, obj=gpu.bench)
    assert gpu.tuned == []


@NO_GPU
def test_without_a_gpu(tmp_path: Path) -> None:
    message = refused("tune", *LAYER, "--store", tmp_path, status=1)
    assert message.startswith("Error: tuning needs a GPU")
    assert "audit --replay" in message
    # What is wrong with a layer is said first, wherever.
    assert "'--input'" in refused("tune", "--input", "4,5,8,8", "--weight", "4,4,3,3")


def failing(**changes: Any) -> Callable[[str], SimulatedTimer]:
    """Timers of GPUs that are not as they should be."""

    def timer(name: str) -> SimulatedTimer:
        sound = preset(name)
        return SimulatedTimer(dataclasses.replace(sound.gpu, **changes), sound.engines)

    return timer


def test_the_gpu_is_lost(tmp_path: Path) -> None:
    sound, lost = preset, failing(lost_at_ms=10.0)
    gpu = Simulated(lambda name: (lost if name == SCENES["dgrad"] else sound)(name))
    message = refused("tune", *LAYER, "--store", tmp_path, status=1, obj=gpu.bench)
    assert "the GPU fails" in message
    assert "dgrad 16×64×28×28" in message
    assert "unspecified launch failure" in message
    # Nothing more is tried; what was decided before is there.
    assert [problem.op for problem, _ in gpu.tuned] == ["fprop", "dgrad"]
    assert [problem.op for problem in kept(tmp_path)] == ["fprop"]


def test_one_problem_cannot_be_tuned(tmp_path: Path) -> None:
    sound, full = preset, failing(out_of_memory_at_ms=10.0)
    gpu = Simulated(lambda name: (full if name == SCENES["dgrad"] else sound)(name))
    done = run("tune", *LAYER, "--store", tmp_path, obj=gpu.bench)
    assert done.exit_code == 1
    assert "dgrad 16×64×28×28, 64 of 3×3, padding 1: not tuned: out of memory" in done.stdout
    assert "1 of 3 problems could not be tuned; PyTorch serves them" in done.stderr
    assert [problem.op for problem in kept(tmp_path)] == ["fprop", "wgrad"]
