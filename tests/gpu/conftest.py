"""What one test has compiled for the GPU serves the others, in all processes of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.conv import small_layer

from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.store import kept_plans
from cudnn_autotune.store.kept_plans import PLAN, Kind, PlanFiles


@pytest.fixture(scope="session")
def compiled_in_this_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the run share, as a store."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"


@pytest.fixture(autouse=True)
def compiled_once(
    request: pytest.FixtureRequest, compiled_in_this_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans and kernels are kept in this folder whichever store the test has, or none.

    A test that asks when and where something is compiled has the marker ``compiles``.
    """
    if request.node.get_closest_marker("compiles"):
        return

    def files_for(gpu: kept_plans.GpuKey | None, kind: Kind = PLAN) -> PlanFiles | None:
        return kept_plans._files(compiled_in_this_run, True, True, gpu, kind)

    monkeypatch.setattr(kept_plans, "files_for", files_for)


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return small_layer.operands()


@pytest.fixture
def crowd() -> Iterator[Callable[[int | None], None]]:
    """Returns a function that leaves only so many bytes to allocate, or all of them for ``None``.

    What the allocator keeps unused beside tensors that live on, as cuBLAS's workspaces of earlier
    tests do, would come on top of these bytes, so it is held.
    """
    held: list[torch.Tensor] = []

    def leave(room: int | None) -> None:
        held.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        if room is None:
            return
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(reserved / total)
        for mebibytes in (512, 128, 32, 8, 2):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction((reserved + room) / total)

    yield leave
    leave(None)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Inductor compiles every graph anew. Triton's kernels and precompiled headers, which are found
    by their content, are those of all tests."""
    from torch._inductor import config
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    clear_caches()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()
    clear_caches()


@pytest.fixture
def seems_fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that makes one way to compute norms seem the fastest: ``"pytorch"``, or a
    form of kernels. The first form that is timed stands for one that is not."""

    def seems(fastest: str) -> None:
        def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
            forms = [name for name in programs if name != "pytorch"]
            chosen = fastest if fastest in programs else forms[0]
            return {name: 1.0 + (name != chosen) for name in programs}

        monkeypatch.setattr(norm_measuring, "time_in_turns", in_turns)

    return seems
