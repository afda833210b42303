"""A second process measures nothing of what the first one has measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.served_on_cpu import kernels_on_cpu, served_on_cpu
from support.store.first_calls import KINDS, first_call, in_process
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx import Graph, GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cudnn_autotune as ca
from cudnn_autotune.compile import compiled_graph, computation, training_graph
from cudnn_autotune.compile.comparison import Comparison, compare
from cudnn_autotune.core import versions
from cudnn_autotune.store import verdicts

KEPT = Comparison({"reference": 2.0, "other": 1.0}, {})


@pytest.mark.basic(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_process_measures_nothing(kind: str, tmp_path: Path) -> None:
    first, second = (in_process(tmp_path, kind) for _ in range(2))
    assert first["measured"] > 0
    assert (first["source"], second["source"]) == ("tuned", "store")
    assert second["measured"] == 0
    assert second["times"] == pytest.approx(first["times"], rel=1e-5)
    assert first["right"]
    assert second["right"]


def again(folder: Path, kind: str = "inference", **changes: Any) -> str:
    """The source of what a new compilation in this process takes."""
    torch._dynamo.reset()
    source: str = first_call(str(folder), kind, **changes)["source"]
    return source


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inference", "training", "convert"])
def test_what_is_another_computation_is_measured_again(kind: str, tmp_path: Path) -> None:
    assert again(tmp_path, kind) == "tuned"
    changes: list[dict[str, Any]] = [{"batch": 5}, {"activation": "SiLU"}, {"torch_version": "9"}]
    if kind != "convert":
        changes.append({"workspace_limit": 1 << 20})
    for changed in changes:
        assert again(tmp_path, kind, **changed) == "tuned", changed
    assert again(tmp_path, kind) == "store"
    assert again(tmp_path, kind, mode="retune") == "tuned"
    assert again(tmp_path, kind, mode="off") == "tuned"


@pytest.mark.basic(1)
@pytest.mark.parametrize("kind", ["inference", "convert"])
def test_what_may_change_is_not_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provisional choice may change, and so may an engine that a pin forces."""
    monkeypatch.setattr(computation, "are_settled", lambda: False)
    assert again(tmp_path, kind) == "tuned"
    assert not list(tmp_path.glob("*.norms"))


def test_a_kept_program_that_is_wrong_now_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what was found wrong kept: the next process compares again."""
    found = first_call(str(tmp_path), "inference")
    (file,) = tmp_path.glob("*.norms")
    before = file.read_bytes()

    def spoilt(programs: Any, *rest: Any) -> Comparison:
        ours = programs["cudnn_autotune"]
        return compare({**programs, "cudnn_autotune": lambda *x: [2 * ours(*x)[0]]}, *rest)

    monkeypatch.setattr(compiled_graph, "compare", spoilt)
    torch._dynamo.reset()
    again = first_call(str(tmp_path), "inference")
    assert again["source"] == "tuned"
    assert again["times"].keys() == {"inductor"}
    assert again["right"]
    assert ca.compilations()[-1].chosen == "inductor"
    assert file.read_bytes() == before
    assert found["times"].keys() == {"inductor", "cudnn_autotune"}


@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_second_process_compiles_the_fastest_program_alone(
    is_first: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is the one which is compiled first. Its outputs are compared with PyTorch's."""
    compiled: list[str] = []
    compared: list[set[str]] = []
    place, name = {
        "inference": (compiled_graph, "compile_plain"),
        "training": (training_graph, "compile_training"),
    }[kind]
    compile_it = getattr(place, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        compiled.append(name)
        return compile_it(*args, **kwargs)

    def decided(programs: Any, *rest: Any) -> Comparison:
        compared.append({*programs})
        found = compare(programs, *rest)
        times = {name: float((name == "cudnn_autotune") != is_first) + 1 for name in found.times_ms}
        return found if found.is_kept else replace(found, times_ms=times)

    monkeypatch.setattr(place, name, counted)
    monkeypatch.setattr(compiled_graph, "compare", decided)
    assert again(tmp_path, kind) == "tuned"
    first, chosen = len(compiled), ca.compilations()[-1].chosen
    compiled.clear()
    assert again(tmp_path, kind) == "store"
    assert len(compiled) == (first - 1 if is_first else first)
    assert ca.compilations()[-1].chosen == chosen
    assert (chosen == "cudnn_autotune") == is_first
    assert compared[1] == ({"pytorch", chosen} if is_first else compared[0])


def test_kept_times_serve_the_programs_that_they_are_of() -> None:
    programs, ones = {"reference": torch.exp, "other": torch.exp}, torch.ones(3)
    found = compare(programs, [ones], kept=KEPT)
    assert found.is_kept
    assert found.times_ms == KEPT.times_ms
    one_more = {**programs, "third": torch.exp}
    wrong: dict[str, Callable[[Tensor], Tensor]] = {**programs, "other": torch.sin}
    assert not compare({"pytorch": torch.exp, "reference": torch.exp}, [ones], kept=KEPT).is_kept
    assert compare({"pytorch": torch.exp, "other": torch.exp}, [ones], kept=KEPT).is_kept
    for changed in (one_more, wrong):
        found = compare(changed, [ones], kept=KEPT)
        assert not found.is_kept
        assert found.times_ms != KEPT.times_ms


def test_a_comparison_is_read_as_it_was_kept(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    kept = Comparison({"one": 1.5, "other": 2.0}, {"one": 1.25, "other": 0.5})
    verdicts.keep(None, "programs", kept)
    assert verdicts.find_kept(None, "programs", Comparison) == kept


def text(model: nn.Module, x: Tensor) -> str | None:
    """The text of a model's graph."""
    found: list[str | None] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        found.append(computation.of_graph(graph, inputs))
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return found[0]


def net(stride: int = 1, slope: float = 0.1, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, stride, bias=bias), nn.LeakyReLU(slope))


def test_the_text_of_a_graph_says_what_it_computes() -> None:
    x = torch.randn(2, 4, 8, 8)
    known = text(net(), x)
    assert known is not None
    assert text(net(), torch.randn(2, 4, 8, 8)) == known, "numbers are not part of it"
    others = [
        text(net(2), x),
        text(net(slope=0.2), x),
        text(net(bias=False), x),
        text(net().requires_grad_(False), x),
        text(net().double(), x.double()),
        text(net().to(memory_format=torch.channels_last), x),
        text(net(), x.contiguous(memory_format=torch.channels_last)),
        text(net(), torch.randn(3, 4, 8, 8)),
        text(net(), torch.randn(2, 4, 9, 8)),
    ]
    assert len({known, *others}) == 1 + len(others)


def test_the_text_of_a_wrapped_tensor_has_its_parts() -> None:
    x = torch.randn(2, 4, 8, 8)
    two = TwoTensor(x, x)
    known = text(nn.Sigmoid(), two)
    assert text(nn.Sigmoid(), TwoTensor(x + 1, x)) == known
    assert len({known, text(nn.Sigmoid(), x), text(nn.Sigmoid(), TwoTensor(two, x))}) == 3


def test_dynamic_sizes_have_no_text() -> None:
    x = torch.randn(2, 4, 8, 8)
    torch._dynamo.mark_dynamic(x, 2)
    assert text(net(), x) is None


def test_functions_of_pooling_have_texts_of_their_own() -> None:
    """PyTorch makes all of them by one function."""

    class Pool(nn.Module):
        def __init__(self, pool: Callable[[Tensor, int], Tensor]) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(x, 2)

    x = torch.randn(2, 4, 4, 4)
    one, other = (text(Pool(pool), x) for pool in (F.max_pool2d, F.adaptive_max_pool2d))
    assert one != other


def test_a_graph_that_does_not_say_what_it_computes_has_no_text() -> None:
    """Functions of the user's, a checkpoint's policy and Triton kernels do not say it."""

    def saves(*args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    @torch._dynamo.allow_in_graph
    def allowed(x: Tensor) -> Tensor:
        return x.sin()

    class Allowed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = allowed(x)
            return result

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            contexts = partial(create_selective_checkpoint_contexts, saves)
            return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)

    x = torch.randn(2, 4, 8, 8)
    assert text(nn.Sequential(net(), Allowed()), x) is None
    assert text(nn.Sequential(net(), Checkpointed()), x.requires_grad_()) is None
    graph = Graph()
    table = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "kwargs": {}}
    graph.output(graph.call_function(triton_kernel_wrapper_mutation, kwargs=table))
    assert computation.of_graph(GraphModule({}, graph), []) is None


def test_recorded_operators_say_what_runs() -> None:
    def recorded(model: nn.Module, *shape: int) -> str:
        with computation.recorded() as found:
            model(torch.zeros(shape)).sum().backward()
        (digest,) = found
        return digest

    known = recorded(net(), 2, 4, 8, 8)
    assert recorded(net(), 2, 4, 8, 8) == known
    others = [
        recorded(net(2), 2, 4, 8, 8),
        recorded(net(slope=0.2), 2, 4, 8, 8),
        recorded(net(), 3, 4, 8, 8),
    ]
    frozen = net()
    frozen[0].bias.requires_grad_(False)
    others.append(recorded(frozen, 2, 4, 8, 8))
    assert len({known, *others}) == 1 + len(others)


def test_conditions_tell_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def conditions() -> str:
        return computation.conditions("cpu")

    found = [conditions()]
    with ca.enable():
        found.append(conditions())
    with ca.enable("race"):
        found.append(conditions())
    with ca.flags("heuristic"):
        found.append(conditions())
    with ca.flags(workspace_limit=1 << 20):
        found.append(conditions())
    with torch.autocast("cpu", torch.bfloat16):
        found.append(conditions())
    with torch.backends.cudnn.flags(deterministic=True, fp32_precision=None):
        found.append(conditions())
    with torch.backends.mkldnn.flags(enabled=False):
        found.append(conditions())
    before = torch._C._get_fp32_precision_getter("cuda", "matmul")
    torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    found.append(conditions())
    torch._C._set_fp32_precision_setter("cuda", "matmul", before)
    monkeypatch.setattr(computation, "version", lambda: versions.version() + ".1")
    found.append(conditions())
    assert len(set(found)) == len(found)
    monkeypatch.undo()
    assert conditions() == found[0]


def test_modes_that_decide_later_keep_nothing(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    assert computation.is_kept({None, "race"})
    assert not computation.is_kept({None, "online"})
    with ca.flags("online"):
        assert not computation.is_kept({"race"})
    with ca.enable("online"):  # it serves the convolutions of plain programs
        assert not computation.is_kept({"race"})
    with ca.enable():
        assert computation.is_kept({"race"})
    ca.set_store(mode="off")
    assert not computation.is_kept({None})


def test_modes_of_compiled_layers_count(tmp_path: Path) -> None:
    found: list[set[str | None]] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        found.append(computation.modes_of(graph))
        return graph

    layers = (ca.Conv2d(4, 4, 3, sampling="online"), ca.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))
    torch._dynamo.reset()
    with kernels_on_cpu(), served_on_cpu():
        torch.compile(nn.Sequential(*layers), backend=backend)(torch.randn(2, 4, 8, 8))
    assert found == [{"online", None}]
    ca.set_store(tmp_path, mode="read_write")
    assert not computation.is_kept(found[0])


def test_a_models_own_attributes_are_no_modes(tmp_path: Path, recwarn: Any) -> None:
    """Modules that this package does not serve may have any of its own by these names."""
    for _ in range(2):
        ca.set_store(tmp_path, mode="read_write")
        model = net()
        model.sampling = ["bilinear"]
        ca.convert(model, memory_format="auto", example_input=torch.ones(2, 4, 8, 8))
    assert "from the store" in ca.conversion(model).memory_format.reason  # type: ignore[union-attr]
    assert not [str(warning.message) for warning in recwarn if "bilinear" in str(warning.message)]


def test_passes_of_the_user_have_no_text() -> None:
    known = computation.of_inductor({})
    assert known == computation.of_inductor({})
    assert known != computation.of_inductor({"max_autotune": True})
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert computation.of_inductor({}) != known
    assert computation.of_inductor({"joint_custom_pre_pass": lambda graph: None}) is None


def test_compiled_code_is_not_recorded() -> None:
    """It runs as it was written there."""
    function = torch.compile(torch.sin, backend="eager")
    module = nn.ReLU()
    module.compile(backend="eager")
    for compiled in (torch.compile(nn.ReLU(), backend="eager"), module, function):
        for _ in range(2):
            with computation.recorded() as found:
                compiled(torch.ones(3) + 1)
            assert found == []
            compiled(torch.ones(3))
