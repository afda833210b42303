"""Stored decisions of a mode that is not registered here, as that of another program or a former
one of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from decisions import under
from stored import fill, layer, simulation, succeeded

import cudnn_autotune as ca
from cudnn_autotune.store import Decision, Policy
from cudnn_autotune.tuning import remembering

MODE = "neighbour"


@pytest.fixture
def decision() -> Decision:
    assert MODE not in ca.sampling.names()
    return under(simulation("quiet", layer()), mode=MODE)


@pytest.mark.search
def test_no_other_mode_is_served_by_it(decision: Decision, tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    ca.get_store().add([decision])
    for mode in ("auto", "race"):
        assert remembering.find(decision.problem, Policy(mode), 0) is None
    larger = layer(channels=128)
    assert remembering.find(larger, Policy("auto"), 0) is None
    assert remembering.similar(larger, 0) == [decision.chosen.candidate]
    measured = under(decision, mode="auto")
    ca.get_store().add([measured])
    assert remembering.find(decision.problem, Policy("auto"), 0).decision.sampling == "auto"


def test_commands_show_it(decision: Decision, tmp_path: Path) -> None:
    file = fill(tmp_path / "store", [decision])
    of_mode = ("--contains", f"sampling={MODE}")
    assert "1 of 1 decision" in succeeded("show", "--store", file, *of_mode)
    assert "none of its 1 decision has" in succeeded("show", "--store", file, "--sampling", "auto")
    succeeded("report", tmp_path / "page.html", "--store", file)
    assert MODE in (tmp_path / "page.html").read_text()
    succeeded("prune", "--store", file, *of_mode, "--yes")
    assert not file.exists()
