"""Kernels of the package that serve a new size at once, since they are compiled already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.simulation import candidate

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.core import nvrtc
from cudnn_autotune.engines import compiled_kernels
from cudnn_autotune.engines.compiled_kernels import cubin, is_found
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.offers import alike, gpu_of, offers_of, recipe_of
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch
from cudnn_autotune.tuning import new_sizes
from cudnn_autotune.tuning.new_sizes import Nearby, ready

pytestmark = pytest.mark.search

H100 = gpu_of("h100")


def first_layer(height: int) -> ca.ConvProblem:
    return ca.ConvProblem(
        *("fprop", (64, 3, height, 224), (64, 3, 7, 7), 2, 3),
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


HERE, NEARBY = first_layer(288), first_layer(224)


@pytest.fixture(autouse=True)
def nothing_is_compiled(tmp_path: Path) -> Iterator[None]:
    """Nor is anything kept in the store's folder; and what waits is compiled by the end."""
    compiled_kernels.clear()
    ca.set_store(tmp_path, mode="read_write")
    yield
    finish()
    compiled_kernels.clear()


def finish() -> None:
    while new_sizes._waiting:
        new_sizes._waiting.popleft().result()


def compile_for(problem: ca.ConvProblem, text: str) -> None:
    for launch in recipe_of(text, problem, H100).launches:
        if isinstance(launch, KernelLaunch) and isinstance(launch.kernel, Kernel):
            cubin(launch.kernel, H100.compute_capability)


def kernels(problem: ca.ConvProblem) -> list[Candidate]:
    return [c for c in offers_of(problem, H100) if c.text.startswith("few_channels@")]


def nearby(*serving: Candidate, any_setting: bool = True) -> Nearby:
    names = {c.engine_name for c in serving if c.id.is_implementation}
    return Nearby(serving, frozenset(names if any_setting else ()))


def texts(*serving: Candidate, problem: ca.ConvProblem = HERE, **others: bool) -> list[str]:
    return [c.text for c in ready(nearby(*serving, **others), problem, H100)]


def test_what_needs_no_compiling_is_ready() -> None:
    compiled = Candidate(78, {}, 0, (), ("RUNTIME_COMPILATION",), "eng78", "A", 0)
    assert texts(candidate("first"), compiled, OWN_PATH) == ["first", "aten"]
    assert not new_sizes._waiting


def test_a_kernel_that_is_compiled_serves_with_the_settings_of_the_size() -> None:
    winner, *_ = kernels(NEARBY)
    best, second, *_ = kernels(HERE)
    assert winner.text not in [c.text for c in kernels(HERE)], "its settings are of another size"
    compile_for(HERE, second.text)
    # The best guess is not compiled, and another setting is.
    assert texts(candidate("other"), winner, OWN_PATH) == ["other", second.text, "aten"]
    finish()
    assert texts(winner) == [best.text]


def test_the_best_setting_is_compiled_even_if_another_one_is_taken() -> None:
    winner, *_ = kernels(NEARBY)
    best, second, *_ = kernels(HERE)
    compile_for(HERE, second.text)
    assert next(ready(nearby(winner, OWN_PATH), HERE, H100)).text == second.text
    finish()
    assert texts(winner) == [best.text]


def test_settings_that_were_not_measured_nearby_do_not_serve_where_some_are_slow() -> None:
    winner, *_ = kernels(NEARBY)
    best, second, *_ = kernels(HERE)
    for kernel in (best, second):
        compile_for(HERE, kernel.text)
    assert texts(winner, any_setting=False) == []
    assert texts(winner, second, any_setting=False) == [second.text]
    assert texts(second, best, any_setting=False) == [second.text]


def test_it_is_compiled_for_the_sizes_to_come() -> None:
    winner, *_ = kernels(NEARBY)
    assert texts(winner, candidate("slower")) == ["slower"]
    finish()
    assert texts(winner, candidate("slower")) == [kernels(HERE)[0].text, "slower"]
    assert not new_sizes._waiting, "it is compiled once"


def test_the_same_settings_come_first() -> None:
    last = kernels(HERE)[-1]
    first, *others = alike(last.text, HERE, H100)
    assert first.text == last.text
    assert [c.text for c in others] == [c.text for c in kernels(HERE)[:-1]]


def test_a_kernel_that_an_earlier_process_has_kept_is_ready() -> None:
    best, *_ = kernels(HERE)
    compile_for(HERE, best.text)
    compiled_kernels.clear()  # as in a new process
    (kernel,) = recipe_of(best.text, HERE, H100).kernels or ()
    assert is_found(kernel, H100.compute_capability)
    assert texts(best) == [best.text]
    compiled_kernels.clear()
    assert not is_found(kernel, (9, 9)), "it is of another architecture"


def test_a_kernel_that_does_not_compile_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, function: str, options: list[str]) -> bytes:
        raise _C.PlanError("there is no NVRTC")

    monkeypatch.setattr(nvrtc, "compile_kernel", refuse)
    winner, *_ = kernels(HERE)
    for _ in range(2):
        assert texts(winner) == []
        finish()


def test_an_engine_within_a_rewrite_would_have_to_be_built() -> None:
    problem = ca.ConvProblem(
        *("dgrad", (2, 3, 224, 224), (64, 3, 7, 7), 2, 3),
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )
    padded = next(c for c in offers_of(problem, H100) if c.text.startswith("pad_channels@"))
    compile_for(problem, padded.text)
    assert texts(padded, problem=problem) == []
    assert not new_sizes._waiting
