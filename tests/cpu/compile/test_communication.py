"""What communicates between ranks runs equally often on all of them: nothing is compared there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import communicating_models as models
from support.processes.gloo_ranks import Ranks
from torch.fx import Graph, GraphModule

from cudnn_autotune.compile.communication import communicates

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
COMPILING_S = 400.0  # on busy cores


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["functional", "legacy"])
def test_a_graph_with_a_collective_is_not_compared(two: Ranks, kind: str) -> None:
    for ran in two.run(models.compiled, kind, False, timeout_s=COMPILING_S):
        assert ran.error is None
        assert ran.value == {
            "is_right": True,
            "times": {},
            "chosen": "cudnn_autotune",
            "note": "not compared: the graph communicates between ranks",
            "fused": 1,
        }


@pytest.mark.slow
def test_groups_are_not_judged_by_the_clock_of_one_rank(two: Ranks) -> None:
    """All ranks have to run the same program."""
    done = two.run(models.compiled, "functional", True, timeout_s=COMPILING_S)
    assert [ran.error for ran in done] == [None, None]
    assert [(ran.value["is_right"], ran.value["fused"]) for ran in done] == [(True, 0)] * 2


@pytest.mark.parametrize("kind", ["functional", "legacy", "backward"])
def test_convert_does_not_measure_a_model_that_communicates(two: Ranks, kind: str) -> None:
    """It stays contiguous on all ranks, and each is told."""
    for ran in two.run(models.laid_out, kind, timeout_s=60.0):
        assert ran.error is None
        is_last, (said,) = ran.value
        assert not is_last
        assert "memory_format='auto' stays contiguous: it communicates between ranks" in said
        assert "all_reduce" in said or "allreduce_" in said


def test_a_model_that_does_not_communicate_is_measured_among_ranks(two: Ranks) -> None:
    for ran in two.run(models.laid_out, "nothing", timeout_s=60.0):
        assert ran.error is None
        assert ran.value[1] == []


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (torch.ops.aten.relu.default, (), False),
        (ALL_REDUCE, (), True),
        (torch.ops.c10d.allreduce_.default, (), True),
        (torch.ops._dtensor.shard_dim_alltoall.default, (), True),
        (torch.ops.higher_order.with_effects, (None, ALL_REDUCE), True),
        (torch.ops.higher_order.with_effects, (None, torch.ops.aten.relu.default), False),
    ],
)
def test_collectives_are_known(target: Any, args: tuple[Any, ...], expected: bool) -> None:
    assert communicates(models.graph_with(target, *args)) == expected


def test_a_collective_in_a_nested_graph_is_known() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    branch = graph.get_attr("branch")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (x, branch, branch, (x,))))
    for target, expected in ((torch.ops.aten.relu.default, False), (ALL_REDUCE, True)):
        root = torch.nn.Module()
        root.branch = models.graph_with(target)
        assert communicates(GraphModule(root, graph)) == expected


def test_an_unknown_operator_may_communicate_among_ranks(two: Ranks) -> None:
    assert two.values(models.foreign_operator_communicates) == [True, True]
    assert not models.foreign_operator_communicates()
