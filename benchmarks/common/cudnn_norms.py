"""cuDNN's own engines for a batch norm in training, through the package ``nvidia-cudnn-frontend``.

Its forward is a graph of norm, addition, ReLU and mask; its backward is one of mask, norm and the
residual's gradient. All execution plans that cuDNN's heuristics list for each are built and timed,
and the fastest is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.timers.stopwatch import Stopwatch

EPS = 1e-5
_WARM_UPS = 2
_ROUNDS = 7
_BUILDING_S = 15.0
"""Seconds after which no further plan of a graph is built."""
_SLOWEST = 3.0
"""Times the fastest plan's first time, beyond which a plan is timed no more."""


class CudnnNorm:
    """A batch norm, plus a residual, then ReLU, forward and backward by cuDNN's engines.

    Args:
        given: the operands ``input``, ``weight``, ``bias``, ``grad_output`` and, if one is added,
            ``residual``: (N, C, H, W) in float16 or bfloat16, parameters (C,) in float32.

    Raises:
        ImportError: there is no ``nvidia-cudnn-frontend``.
        RuntimeError: cuDNN has no plan for one of the graphs.
    """

    def __init__(self, given: dict[str, Tensor]) -> None:
        import cudnn

        self._cudnn, self._handle = cudnn, cudnn.create_handle()
        self._types = {
            torch.float16: cudnn.data_type.HALF,
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float32: cudnn.data_type.FLOAT,
            torch.bool: cudnn.data_type.BOOLEAN,
        }
        x = given["input"].detach()
        channels = (1, x.shape[1], 1, 1)
        self.plans: dict[str, str] = {}
        """Name of the fastest plan, and how many were timed, of the forward and the backward."""
        self._values = {
            "x": x,
            "residual": given["residual"].detach() if "residual" in given else None,
            "scale": given["weight"].detach().float().view(channels),
            "bias": given["bias"].detach().float().view(channels),
            "dy": given["grad_output"].detach(),
            "y": torch.empty_like(x),
            "zero": torch.zeros_like(x),
            "mask": torch.empty_like(x, dtype=torch.bool),
            "dx": torch.empty_like(x),
            "dresidual": torch.empty_like(x),
            **{
                name: torch.ones(channels, device=x.device)
                for name in ("mean", "inv_std", "in_mean", "in_var", "out_mean", "out_var")
            },
            "dscale": torch.empty(channels, device=x.device),
            "dbias": torch.empty(channels, device=x.device),
            "epsilon": torch.full((1, 1, 1, 1), EPS),
            "momentum": torch.full((1, 1, 1, 1), 0.1),
        }
        self.forward = self._fastest("forward", *self.forward_graph(self._graph()))
        self._backward = self._fastest("backward", *self.backward_graph(self._graph()))

    def step(self) -> list[Tensor]:
        """Runs both; returns the output and the gradients, in the order of the operands."""
        self.forward()
        self._backward()
        of = self._values
        gradients = [of["dx"], of["dscale"].flatten(), of["dbias"].flatten()]
        residual = [] if of["residual"] is None else [of["dresidual"]]
        return [of["y"], *gradients, *residual]

    def _graph(self) -> Any:
        kind = self._types[self._values["x"].dtype]
        wide = self._cudnn.data_type.FLOAT
        return self._cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=self._handle,
        )

    def _tensor(self, graph: Any, name: str) -> Any:
        value = self._values[name]
        return graph.tensor(
            dim=list(value.shape),
            stride=list(value.stride()),
            data_type=self._types[value.dtype],
            is_pass_by_value=name in ("epsilon", "momentum"),
        )

    def forward_graph(self, graph: Any) -> tuple[Any, dict[Any, str]]:
        """The graph, and which of the values each of its tensors at the border is."""
        like = {
            name: self._tensor(graph, name)
            for name in ("x", "scale", "bias", "in_mean", "in_var", "epsilon", "momentum", "zero")
        }
        norm = graph.batchnorm(
            input=like["x"],
            scale=like["scale"],
            bias=like["bias"],
            in_running_mean=like["in_mean"],
            in_running_var=like["in_var"],
            epsilon=like["epsilon"],
            momentum=like["momentum"],
        )
        z, *statistics_of_it = norm
        if self._values["residual"] is not None:
            like["residual"] = self._tensor(graph, "residual")
            z = graph.add(a=z, b=like["residual"])
        y = graph.relu(input=z)
        mask = graph.cmp_gt(input=y, comparison=like["zero"])
        y.set_output(True)
        mask.set_output(True).set_data_type(self._cudnn.data_type.BOOLEAN)
        names = ("mean", "inv_std", "out_mean", "out_var")
        for tensor in statistics_of_it:
            tensor.set_output(True).set_data_type(self._cudnn.data_type.FLOAT)
        found = {tensor: name for name, tensor in like.items()}
        found |= dict(zip(statistics_of_it, names, strict=True))
        return graph, found | {y: "y", mask: "mask"}

    def backward_graph(self, graph: Any) -> tuple[Any, dict[Any, str]]:
        """The graph of the backward, and which value each of its tensors at the border is."""
        like = {
            name: self._tensor(graph, name)
            for name in ("x", "mask", "scale", "mean", "inv_std", "dy")
        }
        masked = graph.scale(input=like["dy"], scale=like["mask"])
        kind = self._types[self._values["x"].dtype]
        masked.set_data_type(kind)
        found = {tensor: name for name, tensor in like.items()}
        if self._values["residual"] is not None:
            masked.set_output(True)
            found[masked] = "dresidual"
        dx, dscale, dbias = graph.batchnorm_backward(
            grad=masked,
            input=like["x"],
            scale=like["scale"],
            mean=like["mean"],
            inv_variance=like["inv_std"],
        )
        dx.set_output(True).set_data_type(kind)
        for tensor in (dscale, dbias):
            tensor.set_output(True).set_data_type(self._cudnn.data_type.FLOAT)
        return graph, found | {dx: "dx", dscale: "dscale", dbias: "dbias"}

    def _fastest(self, which: str, graph: Any, border: dict[Any, str]) -> Callable[[], None]:
        cudnn = self._cudnn
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        values = {tensor: self._values[name] for tensor, name in border.items()}
        times: dict[int, float] = {}
        began = time.monotonic()
        count = graph.get_execution_plan_count()
        failures = []

        def runner(index: int) -> Callable[[], None]:
            size = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(size, 1), device="cuda", dtype=torch.uint8)

            def run() -> None:
                stream = torch.cuda.current_stream().cuda_stream
                cudnn.set_stream(handle=self._handle, stream=stream)
                graph.execute_plan_at_index(values, workspace, index, handle=self._handle)

            return run

        for index in range(count):
            if time.monotonic() - began > _BUILDING_S:
                break
            try:
                graph.build_plan_at_index(index)
                times[index] = _time_ms(runner(index), min(times.values(), default=None))
            except Exception as error:  # cuDNN declines some of what it lists
                failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
        if not times:
            raise RuntimeError(f"none of {count} plans of the {which} runs: {failures[:1]}")
        best = min(times, key=lambda index: times[index])
        self.plans[which] = f"{graph.get_plan_name_at_index(best)}, of {len(times)}"
        return runner(best)


def _time_ms(run: Callable[[], None], best: float | None) -> float:
    """Median milliseconds of a call; of one call alone if that is far slower than the best."""
    samples: list[float] = []
    for count in range(_WARM_UPS + _ROUNDS):
        with Stopwatch() as watch:
            run()
        time_ms = watch.ms()
        if count >= _WARM_UPS:
            samples.append(time_ms)
            if best is not None and samples[0] > _SLOWEST * best:
                break
    return statistics.median(samples)
