"""Models that are wrapped for several ranks: converted before that or after it."""

from __future__ import annotations

from collections.abc import Iterator

import converted_model
import pytest
from gloo_ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


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
