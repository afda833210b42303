"""The package on a GPU, as compare_sampling.py's workers use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import numbers
from common.convolution import Case, our_call, problem, set_torch_mode, tensors, torch_call
from common.timing import host_ms, interleaved


class CudaBackend:
    """Candidates, measuring and picking through the package's public API."""

    device = "cuda"

    def prepare(self) -> None:
        """Context, cuDNN handle and libraries: what only the first call of a process pays."""
        import torch

        torch.manual_seed(0)
        tiny = Case("tiny", "fprop", (2, 16, 9, 9), (16, 16, 3, 3), padding=1)
        for op in ("fprop", "dgrad", "wgrad"):
            case = Case("tiny", op, tiny.input_shape, tiny.weight_shape, padding=1)
            data = tensors(case, self.device)
            torch_call(case, data)()
            our_call(case, data, "heuristic")()
        torch.cuda.synchronize()

    def candidates(self, case: Case) -> list[tuple[str, int]]:
        """(text, engine) of every candidate, in the heuristics' order."""
        import cudnn_autotune as ca

        return [(c.text, c.engine) for c in ca.candidates(problem(case), device=self.device)]

    def measure(
        self, case: Case, texts: Sequence[str], *, rounds: int, target_ms: float, cache: str
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        """(per-call times in ms by text, reasons of those that do not build or run)."""
        import cudnn_autotune as ca

        what = problem(case)

        def times(some: Sequence[str]) -> dict[str, list[float]]:
            result: dict[str, list[float]] = ca.measure(
                what,
                list(some),
                rounds=rounds,
                target_ms=target_ms,
                device=self.device,
                cache=cache,
            )
            return {text: list(result[text]) for text in some if text in result}

        if not texts:
            return {}, {}
        try:
            return times(texts), {}
        except RuntimeError as error:
            if len(texts) == 1:
                return {}, {texts[0]: str(error)}
        # One bad config fails the whole call: find it, then measure the others together.
        failed: dict[str, str] = {}
        for text in texts:
            try:
                ca.build_plan(what, text, device=self.device)
            except RuntimeError as error:
                failed[text] = str(error)
        good = [text for text in texts if text not in failed]
        try:
            return (times(good) if good else {}), failed
        except RuntimeError as error:
            return {}, {**failed, **dict.fromkeys(good, str(error))}

    def pick(self, case: Case, mode: str) -> dict[str, Any]:
        """What `mode` chooses, as a first call of the op meets it."""
        import torch

        import cudnn_autotune as ca

        ca.forget()
        data = tensors(case, self.device)
        call = our_call(case, data, mode)
        fallbacks = dict(ca.fallbacks())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        wall_ms = host_ms(call, self.device)
        peak = torch.cuda.max_memory_allocated() - held
        steady_ms = host_ms(call, self.device)
        chosen = [c for c in ca.choices() if c.problem.op == case.op]
        result: dict[str, Any] = {
            "first_call_ms": numbers.significant(wall_ms),
            "tuning_wall_ms": numbers.significant(max(0.0, wall_ms - steady_ms)),
            "peak_mb": numbers.significant(peak / 2**20, 4),
        }
        if not chosen:
            new = {k: n - fallbacks.get(k, 0) for k, n in ca.fallbacks().items()}
            reason = ", ".join(k for k, n in new.items() if n)
            return {"text": "aten", "aten_because": reason, **result}
        choice = chosen[-1]
        expected = problem(case).text
        if choice.problem.text != expected:
            result["problem_differs"] = [choice.problem.text, expected]
        return {
            "text": choice.text,
            "engine": choice.engine,
            "believed_ms": numbers.significant(choice.time_ms),
            "tuning_ms": numbers.significant(choice.tuning_ms),
            "workspace_bytes": choice.workspace_bytes,
            "candidates": choice.candidates,
            "samples": choice.samples,
            "total_samples": choice.total_samples,
            **result,
        }

    def torch_against(
        self, case: Case, torch_mode: str, reference: str, *, rounds: int, target_ms: float
    ) -> dict[str, Any]:
        """PyTorch's call against the pick of our mode `reference`, taking turns."""
        import torch

        set_torch_mode(torch_mode)
        data = tensors(case, self.device)
        call = torch_call(case, data)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        wall_ms = host_ms(call, self.device)
        peak = torch.cuda.max_memory_allocated() - held
        steady_ms = host_ms(call, self.device)
        pick = self.pick(case, reference)
        times = interleaved(
            {"pytorch": call, "ours": our_call(case, data, reference)},
            device=self.device,
            rounds=rounds,
            target_ms=target_ms,
        )
        return against(times, pick, wall_ms, steady_ms, peak)


def against(
    times: dict[str, list[float]],
    pick: dict[str, Any],
    wall_ms: float,
    steady_ms: float,
    peak_bytes: float,
) -> dict[str, Any]:
    """The record of one PyTorch row: medians, and the ratio of paired rounds."""
    ratios = [a / b for a, b in zip(times["pytorch"], times["ours"], strict=True)]
    return {
        "reference_text": pick["text"],
        "pytorch_ms": numbers.significant(numbers.median(times["pytorch"])),
        "reference_ms": numbers.significant(numbers.median(times["ours"])),
        "ratio": numbers.significant(numbers.median(ratios)),
        "ratio_quartiles": numbers.all_significant(
            [numbers.quantile(ratios, 0.25), numbers.quantile(ratios, 0.75)]
        ),
        "rounds": len(ratios),
        "first_call_ms": numbers.significant(wall_ms),
        "tuning_wall_ms": numbers.significant(max(0.0, wall_ms - steady_ms)),
        "peak_mb": numbers.significant(peak_bytes / 2**20, 4),
    }
