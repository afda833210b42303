"""``cudnn-autotune check``, for GPUs that are not here: candidates are built, and nothing runs."""

from __future__ import annotations

import pytest
import torch
from support.kernels.user_implementations import EMPTY, Written, registered
from support.store.stored import refused, run, succeeded

import cudnn_autotune as ca

pytestmark = pytest.mark.search

LAYER = ("--input", "2,64,9,9", "--weight", "64,1,3,3", "--groups", "64", "--padding", "1")
HALF = ("--dtype", "float16", "--channels-last", "--op", "fprop")
DEPTHWISE = ca.ConvProblem(
    "fprop",
    (2, 64, 9, 9),
    (64, 1, 3, 3),
    groups=64,
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.mark.parametrize("gpu", ["h200", "t4"])
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_here(gpu: str) -> None:
    with registered(Written(EMPTY)):
        text = succeeded("check", *LAYER, *HALF, "--candidate", "written", "--gpu", gpu)
    assert f"on {gpu}" in text
    assert "written@1: empty compiles to" in text
    assert "workspace 512 B" in text
    assert f"Nothing was run, since {gpu} is not here" in text


def test_a_kernel_that_does_not_compile_is_told_with_the_compilers_words() -> None:
    with registered(Written("no C++")):
        done = run("check", *LAYER, *HALF, "--candidate", "written@1", "--gpu", "h100")
        # The engines of cuDNN are built as well, and none of them is at fault.
        everything = run("check", *LAYER, *HALF, "--gpu", "h100")
    assert done.exit_code == everything.exit_code == 1
    assert 'identifier "no" is undefined' in done.stdout
    assert "1 candidate at fault" in done.stderr
    assert "1 candidate at fault" in everything.stderr
    assert "eng" in everything.stdout


@NO_GPU
def test_without_a_gpu_candidates_are_built_for_another() -> None:
    with registered(Written(EMPTY)):
        text = succeeded("check", *LAYER, *HALF, "--candidate", "written")
    assert "on h100" in text
    assert "Nothing was run, since there is no CUDA GPU here" in text


def test_a_kernel_of_the_package_is_found_by_its_name() -> None:
    text = succeeded("check", *LAYER, *HALF, "--candidate", "depthwise", "--gpu", "h200")
    texts = [candidate.text for candidate in ca.expert.candidates(DEPTHWISE, "h200")]
    offered = [one for one in texts if one.startswith("depthwise@")]
    assert offered
    assert all(f"{one}: " in text for one in offered)
    assert text.count(" compiles to ") >= len(offered)
    assert "(device.cuh, depthwise_thread.cuh, depthwise_tile.cu) compiles to" in text
    assert "eng" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--candidate", "dept"), "'--candidate': 'dept' is not offered for fprop"),
        (("--candidate", "dept"), "allowed are: eng"),
        (("--candidate", " "), "'--candidate': must be a text that is not empty"),
        (("--gpu", "cuda"), "'--gpu'"),
        (("--gpu", "h300"), "'--gpu'"),
        (("--gpu", "none.json"), "cannot read the property file"),
        (("--groups", "7"), "'--input'"),
        (("--input", "1,64,8,8"), "one --input"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], said: str) -> None:
    given = ("check", *LAYER, *HALF, "--gpu", "h100", *arguments)
    assert said in refused(*given)
