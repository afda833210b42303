"""A dry run on a CPU: PyTorch's two CPU implementations stand in for cuDNN's engines.

It drives the whole of compare_sampling.py where there is no GPU. What it measures is about
this CPU; it says nothing about cuDNN, and such records are never published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import numbers
from common.convolution import Call, Case, set_torch_mode, tensors, torch_call
from common.timing import host_ms, interleaved

from .cuda_backend import against

ENGINES = {"cpu0:onednn": True, "cpu1:native": False}
# Timed calls per candidate, after one warm-up call; heuristic takes the first without timing.
SAMPLES = {"heuristic": 0, "sample_once": 1, "median_of_three": 3, "till_stable": 2}


class CpuBackend:
    device = "cpu"

    def prepare(self) -> None:
        import warnings

        import torch

        # mkldnn.flags() sets a TF32 flag as well, which only Intel GPUs have.
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        torch.manual_seed(0)
        case = Case("tiny", "fprop", (1, 4, 5, 5), (4, 4, 3, 3), dtype="float32")
        torch_call(case, tensors(case, "cpu"))()

    def _calls(self, case: Case, texts: Sequence[str]) -> dict[str, Call]:
        import torch

        call = torch_call(case, tensors(case, "cpu"))

        def with_engine(text: str) -> Call:
            def run() -> Any:
                with torch.backends.mkldnn.flags(enabled=ENGINES[text]):
                    return call()

            return run

        return {text: with_engine(text) for text in texts}

    def candidates(self, case: Case) -> list[tuple[str, int]]:
        return [(text, index) for index, text in enumerate(ENGINES)]

    def measure(
        self, case: Case, texts: Sequence[str], *, rounds: int, target_ms: float, cache: str
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        calls = self._calls(case, texts)
        return interleaved(calls, device="cpu", rounds=rounds, target_ms=target_ms), {}

    def pick(self, case: Case, mode: str) -> dict[str, Any]:
        believed: dict[str, float] = {}
        spent = 0.0
        calls = self._calls(case, list(ENGINES))
        for text, call in calls.items():
            samples = [host_ms(call, "cpu") for _ in range(1 + SAMPLES[mode])]
            spent += sum(samples)
            believed[text] = numbers.median(samples[1:] or [0.0])
        text = min(believed, key=lambda t: believed[t])
        return {
            "text": text,
            "engine": list(ENGINES).index(text),
            "tuning_ms": numbers.significant(spent),
            "tuning_wall_ms": numbers.significant(spent),
            "candidates": len(ENGINES),
        }

    def torch_against(
        self, case: Case, torch_mode: str, reference: str, *, rounds: int, target_ms: float
    ) -> dict[str, Any]:
        set_torch_mode(torch_mode)
        call = torch_call(case, tensors(case, "cpu"))
        wall_ms = host_ms(call, "cpu")
        steady_ms = host_ms(call, "cpu")
        pick = self.pick(case, reference)
        ours = self._calls(case, [pick["text"]])[pick["text"]]
        times = interleaved(
            {"pytorch": call, "ours": ours}, device="cpu", rounds=rounds, target_ms=target_ms
        )
        return against(times, pick, wall_ms, steady_ms, 0.0)
