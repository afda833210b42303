"""``cudnn-autotune env``: what is known of the versions that are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import checkout
from support.conv.problems import make
from support.store.decisions import decision
from support.store.stored import fill, run

from cudnn_autotune import _C
from cudnn_autotune.cli.commands import env
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.file_store import Store

UNTRIED = ", with which they were not tried"


@pytest.mark.parametrize(
    ("number", "errata", "preferred"),
    [
        (91900, "in force", "in force"),
        (91902, "in force", "in force"),
        (92800, f"in force in 9.28{UNTRIED}", f"in force in 9.28{UNTRIED}"),
        (91801, f"not in force in 9.18{UNTRIED}", f"not in force in 9.18{UNTRIED}"),
        (100100, f"in force in 10.1{UNTRIED}", f"not in force in 10.1{UNTRIED}"),
    ],
)
def test_what_is_known_of_a_cudnn(
    number: int, errata: str, preferred: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "cudnn_runtime_version", lambda: number)
    known = json.loads(run("env", "--json", "--store", tmp_path).stdout)["known"]
    assert known["wrong engines"] == f"found with cuDNN 9.19, {errata}"
    assert known["engines that auto prefers"] == f"found with cuDNN 9.19, {preferred}"
    problem = make("resnet_fp16_nhwc", "wgrad", padding=(0, 0, 1, 1)).native()
    assert _C.is_known_wrong("eng1:WORKSPACE=0", problem, number) == errata.startswith("in force")


def test_the_figures_are_of_what_the_readme_says() -> None:
    cudnn, torch = (".".join(map(str, of)) for of in (env.FIGURES_CUDNN, env.FIGURES_TORCH))
    text = (checkout.ROOT / "README.md").read_text().replace("\n", " ")
    assert f"with cuDNN {cudnn} and torch {torch}" in text


def test_a_relative_file_is_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "store.json")
    told = json.loads(run("env", "--json", "--store", "store.json").stdout)
    assert told["store"]["decisions"] > 0
    assert told["store"]["other files"] == []
    places = [told[what]["path"] for what in ("store", "compiled plans", "peaks")]
    assert [Path(place).parent for place in places] == [tmp_path] * 3


def test_why_a_store_cannot_be_locked(tmp_path: Path) -> None:
    store_settings.read_environment({store_settings.MODE_VARIABLE: "locked"})
    told = json.loads(run("env", "--json", "--store", tmp_path).stdout)["store"]
    assert f"{tmp_path} has no decisions" in told["cannot be locked"]
    Store(tmp_path).add([decision()])
    told = json.loads(run("env", "--json", "--store", tmp_path).stdout)["store"]
    assert "cannot be locked" not in told
