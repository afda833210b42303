"""Kernels are compiled by NVRTC, once: in a process, and among the processes of a user."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes.subprocesses import evaluate_forked
from support.processes.threads import in_threads

import cudnn_autotune as ca
from cudnn_autotune import _C, kernels
from cudnn_autotune.core import nvrtc
from cudnn_autotune.engines import compiled_kernels
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.recipe import Kernel
from cudnn_autotune.kernels import sources

pytestmark = pytest.mark.search

SOURCE = """
extern "C" __global__ void add(float* y, const float* x, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = x[i] + ADDED;
}
"""
ADD = Kernel(SOURCE, "add", (("ADDED", 1),))
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """The store's folder, where kernels are kept; this process knows none."""
    compiled_kernels.clear()
    ca.set_store(tmp_path, mode="read_write")
    yield tmp_path
    compiled_kernels.clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The options of what NVRTC is given."""
    given: list[tuple[str, ...]] = []
    compile_ = nvrtc.compile_kernel

    def counted(source: str, function: str, options: Sequence[str]) -> bytes:
        given.append(tuple(options))
        return compile_(source, function, options)

    monkeypatch.setattr(nvrtc, "compile_kernel", counted)
    return given


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"plans-{os.geteuid()}/*.cubin"))


# NVRTC


def test_a_kernel_becomes_machine_code_of_the_architecture() -> None:
    options = ["-DADDED=2"]
    codes = [
        nvrtc.compile_kernel(SOURCE, "add", [f"--gpu-architecture={of}", *options])
        for of in ("sm_80", "sm_90")
    ]
    for code in codes:
        assert code.startswith(b"\x7fELF")
        assert b".text.add\0" in code
    assert codes[0] != codes[1]
    assert nvrtc.version() >= (12, 0)


def test_an_error_tells_what_the_compiler_says() -> None:
    source = 'extern "C" __global__ void broken(float* y) {\n  y[0] = undeclared;\n}\n'
    with pytest.raises(_C.PlanError, match=r"(?s)compiling broken.*broken.cu.2.*undeclared"):
        nvrtc.compile_kernel(source, "broken", ["--gpu-architecture=sm_90"])
    with pytest.raises(_C.PlanError, match=r"(?s)compiling add.*--gpu-architecture"):
        nvrtc.compile_kernel(SOURCE, "add", ["-DADDED=1", "--gpu-architecture=sm_12345"])


def test_an_error_in_a_kernel_of_the_package_names_its_file_and_line() -> None:
    code = sources.source(kernels.__name__, "sum_parts.cu")
    lines = sources.text(kernels.__name__, "sum_parts.cu").splitlines()
    line = next(n for n, text in enumerate(lines) if "DYNAMIC_SHARED(shared);" in text)
    wrong = "undeclared();".join(code.rsplit("DYNAMIC_SHARED(shared);", 1))
    defines = ["-DNUMBERS=1", "-DPARTS=1", "-DCOLUMNS=1", "-DELEMENT=float"]
    with pytest.raises(_C.PlanError, match=rf"sum_parts\.cu\({line}\): error.*undeclared"):
        nvrtc.compile_kernel(wrong, "sum_parts", ["--gpu-architecture=sm_90", *defines])
    assert sources.files_of(code) == ["device.cuh", "sum_parts.cu"]
    assert sources.files_of(SOURCE) == []


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (SOURCE.replace("add(", "added("), ["--gpu-architecture=sm_90"]),
        (SOURCE.replace('extern "C"', ""), ["--gpu-architecture=sm_90"]),  # its name is mangled
        (SOURCE, []),
    ],
)
def test_a_source_without_the_kernel_is_refused(source: str, options: list[str]) -> None:
    with pytest.raises(_C.PlanError, match="compiling add"):
        nvrtc.compile_kernel(source, "add", ["-DADDED=1", *options])


def test_other_threads_run_python_meanwhile() -> None:
    """One that holds the GIL while it compiles lets no other thread wake up more than once."""
    long = "".join(f"  y[{i}] = sinf(y[{i}]) + cosf(y[{i}]) * {i};\n" for i in range(12))
    source = f'extern "C" __global__ void add(float* y) {{\n{long}}}\n'
    begins, is_over, awake = threading.Event(), threading.Event(), []

    def wake_up() -> None:
        begins.wait()
        while not is_over.is_set():
            awake.append(True)
            time.sleep(0.001)

    thread = threading.Thread(target=wake_up)
    thread.start()
    begins.set()
    nvrtc.compile_kernel(source, "add", ["--gpu-architecture=sm_90"])
    found = len(awake)
    is_over.set()
    thread.join()
    assert found >= 5


# Once in a process


def test_it_is_compiled_once_and_other_defines_and_gpus_anew(compiled: list[object]) -> None:
    first = cubin(ADD, HOPPER)
    assert cubin(ADD, HOPPER) is first
    other = cubin(replace(ADD, defines=(("ADDED", 2),)), HOPPER)
    assert len({first, other, cubin(ADD, (8, 0))}) == 3
    assert compiled == [
        ("--gpu-architecture=sm_90", "--std=c++17", "-DADDED=1"),
        ("--gpu-architecture=sm_90", "--std=c++17", "-DADDED=2"),
        ("--gpu-architecture=sm_80", "--std=c++17", "-DADDED=1"),
    ]


def test_a_suffix_asks_for_the_instructions_of_one_architecture(
    compiled: list[tuple[str, ...]],
) -> None:
    source = """
extern "C" __global__ void fence(float* y) {
  asm volatile("wgmma.fence.sync.aligned;");
  y[0] = 1;
}
"""
    kernel = Kernel(source, "fence")
    with pytest.raises(_C.PlanError, match=r"(?s)compiling fence.*wgmma"):
        cubin(kernel, HOPPER)
    assert b".text.fence\0" in cubin(replace(kernel, arch_suffix="a"), HOPPER)
    assert [options[0] for options in compiled] == [
        "--gpu-architecture=sm_90",
        "--gpu-architecture=sm_90a",
    ]
    with pytest.raises(_C.PlanError, match=r"(?s)compiling fence.*--gpu-architecture"):
        cubin(replace(kernel, arch_suffix="x"), HOPPER)  # type: ignore[arg-type]


def test_threads_that_want_the_same_kernel_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, codes = [], []

    def slow(*arguments: object) -> bytes:
        calls.append(arguments)
        time.sleep(0.2)
        return b"code"

    monkeypatch.setattr(nvrtc, "compile_kernel", slow)
    in_threads(4, lambda _: codes.append(cubin(ADD, HOPPER)))
    assert len(calls) == 1
    assert codes == [b"code"] * 4


def test_a_failure_reaches_all_who_wait_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> bytes:
        time.sleep(0.2)
        raise _C.PlanError("no memory")

    errors = []

    def ask(_: int) -> None:
        with pytest.raises(_C.PlanError, match="no memory") as error:
            cubin(ADD, HOPPER)
        errors.append(error)

    with monkeypatch.context() as failing:
        failing.setattr(nvrtc, "compile_kernel", fail)
        in_threads(3, ask)
    assert len(errors) == 3
    assert cubin(ADD, HOPPER).startswith(b"\x7fELF")


# Once for the processes of a user


def test_a_kernel_that_was_kept_is_not_compiled(folder: Path, compiled: list[object]) -> None:
    first = cubin(ADD, HOPPER)
    (file,) = files(folder)
    assert file.stat().st_mode & 0o777 == 0o600
    compiled_kernels.clear()
    assert cubin(ADD, HOPPER) == first
    assert len(compiled) == 1
    code = f"""
import cudnn_autotune as ca
from cudnn_autotune.core import nvrtc
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.recipe import Kernel
ca.set_store({str(folder)!r}, mode="read_write")
nvrtc.compile_kernel = None
print(len(cubin(Kernel({SOURCE!r}, "add", (("ADDED", 1),)), (9, 0))))
"""
    assert evaluate_forked(code) == str(len(first))


def test_another_compiler_compiles_anew(
    folder: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin(ADD, HOPPER)
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    cubin(ADD, HOPPER)
    assert len(compiled) == len(files(folder)) == 2


def test_a_damaged_file_is_not_used(folder: Path, compiled: list[object]) -> None:
    first = cubin(ADD, HOPPER)
    (file,) = files(folder)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    compiled_kernels.clear()
    assert cubin(ADD, HOPPER) == first
    assert len(compiled) == 2


@pytest.mark.parametrize(("mode", "kept"), [("off", 0), ("read", 0), ("retune", 1)])
def test_the_stores_mode_says_whether_kernels_are_kept(
    mode: str, kept: int, folder: Path, compiled: list[object]
) -> None:
    ca.set_store(folder, mode=mode)
    cubin(ADD, HOPPER)
    assert len(files(folder)) == kept
    compiled_kernels.clear()
    cubin(ADD, HOPPER)
    assert len(compiled) == 2, "it is not read back"
