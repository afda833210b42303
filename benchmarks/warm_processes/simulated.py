"""Layers that choose engines of a simulated GPU, for dry runs: what is looked up in the store, and
kept there, is real."""

from __future__ import annotations

import time
from typing import Any

import torch
from common import simulated
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import sampling
from cudnn_autotune.sampling import Limits
from cudnn_autotune.store import Decision, Provenance
from cudnn_autotune.tuning import remembering

DEVICE = 0
_SCENE = "quiet"


class SimulatedConv2d(ca.Conv2d):
    """Computes what ``nn.Conv2d`` does, and chooses as ``cudnn_autotune.Conv2d`` does on a GPU:
    at the first call of each problem, forward and backward."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = super()._conv_forward(input, weight, bias)
        choose(self._problem("fprop", input), self.sampling or ca.get_sampling())
        if output.requires_grad:
            ops = ("dgrad", "wgrad") if input.requires_grad else ("wgrad",)
            problems = [self._problem(op, input) for op in ops]
            output.register_hook(lambda gradient: self._backward(problems))
        return output

    def _problem(self, op: str, input: Tensor) -> ca.ConvProblem:
        padding: Any = self.padding
        return ca.ConvProblem(
            op,
            tuple(input.shape),
            tuple(self.weight.shape),
            self.stride,
            padding,
            self.dilation,
            self.groups,
            dtype=input.dtype,
            memory_format=torch.channels_last,
        )

    def _backward(self, problems: list[ca.ConvProblem]) -> None:
        for problem in problems:
            choose(problem, self.sampling or ca.get_sampling())


def choose(problem: ca.ConvProblem, mode: str) -> ca.Choice:
    """What serves ``problem``: what was chosen before, what is remembered, else what is tuned."""
    for choice in ca.choices():
        if (choice.problem, choice.sampling) == (problem, mode):
            return choice
    choice = remembering.find(problem, mode, None, 0, DEVICE) or tuned(problem, mode)
    remembering.commit(choice)
    return choice


def tuned(problem: ca.ConvProblem, mode: str, seed: int = 0) -> ca.Choice:
    begin = time.perf_counter()
    timer = simulated.preset(_SCENE, seed + sum(problem.input_shape))
    selection = sampling.get(mode).select(timer.candidates, timer, Limits())
    assert selection is not None
    decision = Decision(problem, mode, 0, None, selection, provenance=Provenance.now())
    return ca.Choice(decision, DEVICE, tuning_ms=(time.perf_counter() - begin) * 1e3)
