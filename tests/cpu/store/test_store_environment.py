"""The environment of a decision, and the path of its file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.store.decisions import H200, L4

import cudnn_autotune as ca
from cudnn_autotune.store.environment import Environment, file_in
from cudnn_autotune.store.file_store import Store

CHANGES: list[dict[str, Any]] = [
    {"gpu": "NVIDIA H100 80GB HBM3"},
    {"multiprocessors": 114},
    {"compute_capability": "10.0"},
    {"mig_profile": "1g.18gb"},
    {"cudnn": "9.20.0"},
    {"cudnn_frontend": "1.29.0"},
]


def test_it_round_trips() -> None:
    for environment in (H200, L4, Environment.of()):
        tree = json.loads(json.dumps(environment.to_json()))
        assert Environment.from_json(tree) == environment


def test_every_field_counts_in_the_files_name_and_the_digest() -> None:
    assert {name for change in CHANGES for name in change} == {
        field.name for field in dataclasses.fields(Environment)
    }
    found = [H200, *(dataclasses.replace(H200, **change) for change in CHANGES)]
    assert len({environment.file_name for environment in found}) == len(found)
    assert len({environment.digest for environment in found}) == len(found)


def test_the_files_name_can_be_read() -> None:
    described = "nvidia-h200_132sm_sm90_cudnn-9.19.0_frontend-1.28.0"
    assert H200.file_name == f"{described}_{H200.digest}.json"
    mig = dataclasses.replace(H200, mig_profile="1g.18gb", multiprocessors=16)
    described = "nvidia-h200_mig-1g.18gb_16sm_sm90_cudnn-9.19.0_frontend-1.28.0"
    assert mig.file_name == f"{described}_{mig.digest}.json"


def test_no_name_leads_out_of_the_folder() -> None:
    strange = dataclasses.replace(H200, gpu="../../../etc/passwd \n\0\x7f..", cudnn="/")
    assert Path(strange.file_name).name == strange.file_name
    assert not strange.file_name.startswith(".")
    assert strange.file_name.isprintable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    here = Environment.of()
    assert (here.gpu, here.multiprocessors, here.compute_capability) == ("none", 0, "")
    assert here.mig_profile == ""
    versions = ca.environment()
    assert here.cudnn == (versions["cudnn"] or "")
    assert here.cudnn_frontend == (versions["cudnn_frontend"] or "")
    assert here.file_name.startswith("none_0sm_cudnn-")


@pytest.mark.parametrize(
    ("name", "gpu", "profile"),
    [
        ("NVIDIA H200", "NVIDIA H200", ""),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200", "1g.18gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", "NVIDIA A100-SXM4-80GB", "1g.10gb+me"),
    ],
)
def test_the_mig_profile_comes_from_the_gpus_name(name: str, gpu: str, profile: str) -> None:
    found = Environment.from_versions(
        {**ca.environment(), "gpu": name, "multiprocessors": 16, "compute_capability": "9.0"}
    )
    assert (found.gpu, found.mig_profile) == (gpu, profile)
    assert (found.multiprocessors, found.compute_capability) == (16, "9.0")


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu", ""), ("gpu", 3), ("multiprocessors", -1), ("multiprocessors", "132"), ("cudnn", None)],
)
def test_what_is_wrong_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"environment.*{field}: must be"):
        Environment.from_json({**H200.to_json(), field: value})
    with pytest.raises(ValueError, match=r"environment\.colour: is not a known field"):
        Environment.from_json({**H200.to_json(), "colour": "red"})


def test_a_path_is_a_file_or_a_folder(tmp_path: Path) -> None:
    assert file_in(tmp_path / "mine.json", H200) == tmp_path / "mine.json"
    assert file_in(tmp_path / "mine", H200) == tmp_path / "mine" / H200.file_name
    (tmp_path / "folder.json").mkdir()
    assert file_in(tmp_path / "folder.json", H200) == tmp_path / "folder.json" / H200.file_name


def test_a_folder_holds_a_file_for_each_environment(tmp_path: Path) -> None:
    assert Store(tmp_path, H200).path != Store(tmp_path, L4).path
    assert Store(tmp_path).environment == Environment.of()
