"""Markers, skips and a clean slate around every test."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# No test, nor a process that it starts, reads or writes what the user's folder remembers.
os.environ["CUDNN_AUTOTUNE_CACHE"] = "off"
if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.device_count() > 1:
    # Each process has another GPU first, as most tests use no more than that one. CUDA reads the
    # variable once; device_count() asks NVML, and is_available() below asks CUDA.
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = visible.split(",")
    first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
    # The tensors are tiny, also those of references. On busy cores, threads that wait for one
    # another made some tests take fifty times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    # Inductor would start as many helper processes as there are cores, for each process.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from support.conv.served_on_cpu import served_on_cpu
from support.processes.benchmark_scripts import dry_runs_into  # imports the package, as the next do
from support.processes.gloo_ranks import Ranks

import cudnn_autotune as ca
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.store import settings as store_settings

# Other tests may have all of the cores. A test that wants more examples takes a multiple of these.
busy = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The default run draws the same examples everywhere; the whole suite looks for others.
settings.register_profile("basic", busy, max_examples=30, derandomize=True)
settings.register_profile("thorough", busy, max_examples=100)

GPU_TESTS = Path(__file__).parent / "gpu"
MARKERS = {
    "gpu": "needs a CUDA GPU, as all in tests/gpu do",
    "search": "needs cuDNN, so a CUDA build of torch (but no GPU)",
    "alone": "measures the GPU, which no other process may use meanwhile: pytest -m alone",
    "slow": "is thorough rather than basic, and not in the default run: pytest -m ''",
    "basic(n, of=None)": "n of its cases, drawn by its name, are in the default run, and the "
    "others slow; with `of` n of those of each value of that argument",
    "long": "takes many seconds, so each process begins with its share of them",
    "compiles": "what other tests have compiled for the GPU is compiled again",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    settings.load_profile("basic" if "not slow" in config.option.markexpr else "thorough")


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Takes one process more than there are cores, as tests spend a third of their time waiting."""
    processes = yield
    return processes if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else processes + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lets a process that is done take over tests of the others, which ``-n`` alone does not."""
    if config.option.dist != "load":
        return None  # another --dist was asked for
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest itself leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker("gpu")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    absent = {
        "gpu": not torch.cuda.is_available(),
        "search": not extension_available(),
        "alone": processes > 1,
    }
    for item in items:
        for name, is_absent in absent.items():
            if is_absent and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=MARKERS[name]))
    items[:] = long_ones_first(items, processes)


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks the cases of tests with the marker ``basic`` as slow that are not drawn, and what reads
    the records of dry runs, which are whole benchmarks."""
    cases: dict[tuple[str, int | None], list[pytest.Item]] = {}
    for item in items:
        if "dry_runs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        if marker := item.get_closest_marker("basic"):
            test, of = item.nodeid.partition("[")[0], marker.kwargs.get("of")
            cases.setdefault((test, of and id(item.callspec.params[of])), []).append(item)
    for (test, _), some in cases.items():
        marker = some[0].get_closest_marker("basic")
        name = test.rpartition("::")[2]
        drawn = random.Random(name).sample(range(len(some)), min(*marker.args, len(some)))
        for place in set(range(len(some))).difference(drawn):
            some[place].add_marker(pytest.mark.slow)


def long_ones_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Deals the tests with the marker ``long`` to the processes, as their first ones.

    Work stealing gives each process a part of the list, all of one size.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = (item for item in items if not item.get_closest_marker("long"))
    found: list[pytest.Item] = []
    for process in range(processes):
        first = long[process::processes]
        size = (len(items) - len(found)) // (processes - process)
        found += [*first, *islice(others, max(0, size - len(first)))]
    return found


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """No choice, setting or seed survives from one test to the next."""
    sampling = ca.get_sampling()
    workspace_limit = ca.get_workspace_limit()
    benchmark_limit = ca.get_benchmark_limit()
    budget_ms = ca.get_budget_ms()
    new_shapes = ca.get_new_shapes()
    store = store_settings.get_store_settings()
    assert store.mode == "off", "the package was imported before this file forbade the store"
    deterministic_algorithms = torch.are_deterministic_algorithms_enabled()
    # torch.testing._internal, which another test may have imported, forbids to set cuDNN's flags.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    ca.forget()
    torch.manual_seed(0)
    yield
    if torch.are_deterministic_algorithms_enabled() != deterministic_algorithms:
        torch.use_deterministic_algorithms(deterministic_algorithms)  # imports Inductor
    ca.set_sampling(sampling)
    ca.set_workspace_limit(workspace_limit)
    ca.set_benchmark_limit(benchmark_limit)
    ca.set_budget_ms(budget_ms)
    ca.set_new_shapes(new_shapes)
    store_settings.restore_settings(store)
    ca.unpin()
    ca.forget()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """CPU tensors take the way of CUDA tensors."""
    with served_on_cpu():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of this process's store, which is read and written."""
    ca.set_store(tmp_path, mode="read_write")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> ca.Store:
    """The store of this process, which is in that folder."""
    return ca.get_store()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def cudnn_flags() -> Iterator[Callable[..., None]]:
    """``cudnn_flags(allow_tf32=False, ...)`` sets flags of torch.backends.cudnn for this test."""
    cudnn = torch.backends.cudnn
    with ExitStack() as stack:

        def set_flags(**changes: Any) -> None:
            current = {
                name: getattr(cudnn, name)
                for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
            }
            # None leaves fp32_precision, the newer name of allow_tf32, as it is.
            stack.enter_context(
                cudnn.flags(
                    **{**current, **changes},
                    benchmark_limit=cudnn.benchmark_limit,
                    fp32_precision=None,
                )
            )

        yield set_flags


@pytest.fixture(scope="module")
def dry_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of a dry run of each script in the test file's
    ``DRY_RUNS``: script -> arguments."""
    folder = tmp_path_factory.mktemp("dry")
    scripts = request.module.DRY_RUNS
    dry_runs_into(folder, scripts, tells="DRY RUN")
    return folder
