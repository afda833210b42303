"""Models that are wrapped for several ranks: converted before that or after it."""

from __future__ import annotations

import pytest
from support.models import converted_model
from support.norms import ranks as norm_ranks
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ranks


@pytest.mark.basic(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp1", "fsdp2"])
def test_a_wrapped_model_trains_as_it_did(two: Ranks, wrapping: str, when: str) -> None:
    for plain, outputs, served, is_restored in two.values(converted_model.trained, wrapping, when):
        assert outputs == plain
        assert served == 3
        assert is_restored


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp1", "fsdp2"])
def test_its_layout_is_not_changed(two: Ranks, wrapping: str) -> None:
    for said in two.values(converted_model.refusals, wrapping):
        assert len(said) == 2
        assert all("memory_format must be given before the model is wrapped" in s for s in said)


@pytest.mark.parametrize(("last_ms", "is_last"), [([0.5, 1.2], True), ([0.5, 1.8], False)])
def test_ranks_take_one_layout(two: Ranks, last_ms: list[float], is_last: bool) -> None:
    """That which takes the least time in sum; both are tuned."""
    for result in two.values(cases.laid_out, last_ms):
        assert result == {
            "is_last": is_last,
            "problems": cases.problems(4),
            "timed": ["contiguous", "channels_last"],
            "warned": [],
        }


def test_one_rank_refuses_a_layout_for_all(two: Ranks) -> None:
    right, wrong = two.values(cases.laid_out, [0.5, 0.5], 1)
    assert (right["is_last"], wrong["is_last"]) == (False, False)
    assert (right["timed"], wrong["timed"]) == (["contiguous", "channels_last"], [])
    begin = "memory_format='auto' stays contiguous: "
    assert right["warned"] == [begin + "another rank cannot be channels_last"]
    assert wrong["warned"][0].startswith(begin + "in channels_last output 0 has a relative error")


def test_a_rank_that_fails_leaves_all_layouts_as_they_were(two: Ranks) -> None:
    for error, is_as_before in two.values(cases.laid_out_but_lost, 1):
        assert error.startswith("rank 1: RuntimeError: the GPU is lost")
        assert is_as_before


@pytest.mark.parametrize("fastest", [["kept", "kept"], ["pytorch", "kept"]], ids="-".join)
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp2"])
def test_norms_of_ranks_train_as_pytorchs(two: Ranks, wrapping: str, fastest: list[str]) -> None:
    """Ranks measure each for itself, and may choose differently."""
    for rank, (errors, chosen) in enumerate(two.values(norm_ranks.trained, wrapping, fastest)):
        assert all(error < 1e-4 for error in errors.values()), errors
        assert chosen == [[fastest[rank]], [fastest[rank]]]


def test_synchronised_norms_of_ranks_are_pytorchs(two: Ranks) -> None:
    for ours, theirs, is_pytorchs in two.values(norm_ranks.synchronised):
        assert is_pytorchs
        assert ours == theirs != []


def test_two_forwards_before_a_backward_have_the_right_gradients(two: Ranks) -> None:
    """Each forward broadcasts running statistics in place, which PyTorch's backward may refuse. It
    does not read them in training, and the operators have not saved them."""
    for gradients, statistics, is_served in two.values(norm_ranks.called_twice):
        assert is_served
        assert gradients < 1e-5
        assert statistics < 1e-5
