"""Readings of a GPU: what is asked for, and that nothing breaks where there is none."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from cudnn_autotune.sampling import GpuState
from cudnn_autotune.timers.telemetry import Board, Telemetry, nvml_device, reason_names

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.mark.parametrize(
    ("index", "visible", "device"),
    [
        (0, None, 0),
        (2, "", 2),
        (0, "3", 3),
        (1, "3, 5", 5),
        (0, "GPU-8f2a", "GPU-8f2a"),
        (1, "GPU-8f2a,MIG-77", "MIG-77"),
    ],
)
def test_cuda_index_to_nvml(index: int, visible: str | None, device: int | str) -> None:
    assert nvml_device(index, visible) == device


def test_reasons() -> None:
    assert reason_names(0) == ()
    assert reason_names(0x4 | 0x20) == ("sw_power_cap", "sw_thermal_slowdown")


@NO_GPU
def test_without_a_gpu_every_reading_is_none() -> None:
    gpu = Board.of(0)
    assert gpu is Board.of(0)
    assert gpu.unavailable
    assert gpu.state() == GpuState()
    assert set(gpu.fixed().values()) == {None}
    with Telemetry(gpu, period_s=0.005) as telemetry:
        deadline = time.monotonic() + 60
        while len(telemetry.readings) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    result = telemetry.summary()
    assert result["readings"] >= 2
    assert result["clock_mhz"] is result["power_w"] is result["temperature_c"] is None
    assert result["throttle_reasons"] == {}
    assert result["unavailable"] == gpu.unavailable
    readings = len(telemetry.readings)
    time.sleep(0.02)
    assert len(telemetry.readings) == readings, "its thread has ended"


def test_without_nvml_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml" in str(Board(0).unavailable)


@pytest.mark.gpu
def test_with_a_gpu() -> None:
    pytest.importorskip("pynvml")
    gpu = Board.of(0)
    assert gpu.unavailable is None
    state = gpu.state()
    assert 0 < state.clock_mhz <= state.max_clock_mhz
    assert gpu.fixed()["gpu"] == torch.cuda.get_device_name(0)
