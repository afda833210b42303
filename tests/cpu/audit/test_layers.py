"""Layer lists: the benchmark's and the package's own, reading one, and taking a part of one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkout

import cudnn_autotune as ca
from cudnn_autotune.audit.layers import Case, load, select

BENCHMARKS = checkout.ROOT / "benchmarks"
FULL = BENCHMARKS / "layers.json"
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

LAYER: dict[str, Any] = {
    "name": "middle",
    "source": "Net-1, batch 8: body.conv",
    "input_shape": [8, 16, 20, 20],
    "weight_shape": [32, 16, 3, 3],
    "padding": 1,
}


def written(folder: Path, *layers: Any) -> Path:
    path = folder / "own.json"
    path.write_text(json.dumps({"about": "a test", "layers": layers}), encoding="utf-8")
    return path


def network(case: Case) -> str:
    """The beginning of its source, up to the first comma or colon."""
    return re.split("[,:]", case.source, maxsplit=1)[0].strip()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load(FULL)


# --- the benchmark's list


def test_sizes(cases: list[Case]) -> None:
    """A GPU of today holds each, and computes it in some milliseconds."""
    for case in cases:
        problem = case.problem()
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        assert sum(map(math.prod, shapes)) * ITEM_BYTES[case.dtype] <= 1.5e9, case.id
        macs = math.prod(problem.output_shape) * math.prod(problem.weight_shape[1:])
        assert 2 * macs <= 2.5e12, case.id


@pytest.mark.search
def test_cudnn_has_engines_for_them(cases: list[Case]) -> None:
    """Asked of the real cuDNN, for an H200: every tenth case, and every 3-d layer's float16."""
    asked = select(cases, share=(1, 10))
    asked += [c for c in cases if len(c.input_shape) == 5 and c.dtype == "float16"]
    for case in asked:
        assert len(ca.expert.candidates(case.problem(), device="h200")) >= 2, case.id


# --- the short list that the package ships


def test_default_is_a_part_of_the_full_list(cases: list[Case]) -> None:
    short = load()
    assert 8 <= len({case.layer for case in short}) <= 10
    assert len({network(case) for case in short}) >= 5
    assert set(short) < set(cases)


# --- reading a list


def test_a_layer_becomes_a_case_in_each_direction_and_dtype(tmp_path: Path) -> None:
    path = written(tmp_path, {**LAYER, "also": ["float32"], "ops": ["wgrad", "fprop"]})
    assert [case.id for case in load(str(path))] == [
        "middle/wgrad/float16/nhwc",
        "middle/fprop/float16/nhwc",
        "middle/wgrad/float32/nhwc",
        "middle/fprop/float32/nhwc",
    ]
    case = load(path)[-1]
    assert (case.layer, case.source) == ("middle", LAYER["source"])
    assert case.problem() == ca.ConvProblem(
        "fprop",
        (8, 16, 20, 20),
        (32, 16, 3, 3),
        padding=1,
        dtype=torch.float32,
        memory_format=torch.channels_last,
        allow_tf32=True,
    )


def test_only_name_and_shapes_are_needed(tmp_path: Path) -> None:
    needed = {field: LAYER[field] for field in ("name", "input_shape", "weight_shape")}
    first, *others = load(written(tmp_path, needed))
    assert first.problem() == ca.ConvProblem(
        "fprop",
        (8, 16, 20, 20),
        (32, 16, 3, 3),
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )
    assert first.source == ""
    assert [case.op for case in others] == ["dgrad", "wgrad"]


def test_three_dimensions_and_one_entry_per_dimension(tmp_path: Path) -> None:
    layer = {
        "name": "video",
        "input_shape": [2, 8, 6, 20, 24],
        "weight_shape": [8, 4, 3, 1, 5],
        "stride": [1, 2, 3],
        "padding": [1, 0, 4],
        "dilation": [1, 1, 2],
        "groups": 2,
        "also": ["bfloat16"],
    }
    case = load(written(tmp_path, layer))[0]
    assert case.id == "video/fprop/float16/ndhwc"
    problem = case.problem()
    assert problem.memory_format == torch.channels_last_3d
    assert problem.stride == (1, 2, 3)
    assert problem.padding == (1, 0, 4, 1, 0, 4)
    assert problem.dilation == (1, 1, 2)
    x, w = torch.empty(*case.input_shape, device="meta"), torch.empty(8, 4, 3, 1, 5, device="meta")
    y = torch.nn.functional.conv3d(x, w, None, (1, 2, 3), (1, 0, 4), (1, 1, 2), 2)
    assert problem.output_shape == y.shape


def test_other_layouts(tmp_path: Path) -> None:
    plain = {**LAYER, "name": "plain", "channels_last": False}
    line = {
        "name": "line",
        "input_shape": [8, 16, 200],
        "weight_shape": [32, 16, 3],
        "channels_last": False,
    }
    volume = {
        "name": "volume",
        "input_shape": [1, 4, 8, 8, 8],
        "weight_shape": [4, 4, 3, 3, 3],
        "channels_last": False,
    }
    read = load(written(tmp_path, plain, line, volume))
    assert [case.id.split("/")[-1] for case in read[::3]] == ["nchw", "ncw", "ncdhw"]
    assert {case.problem().memory_format for case in read} == {torch.contiguous_format}


# --- malformed lists


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be 1 to 200 letters"),
        ({"name": "a/b"}, "name must be 1 to 200 letters"),
        ({"name": "a,b"}, "name must be 1 to 200 letters"),
        ({"name": 3}, "name: must be a text"),
        ({"source": ["ResNet"]}, "source: must be a text"),
        ({"pading": 1}, "pading: is not a known field"),
        ({"input_shape": "8x16x20x20"}, "input_shape: must be a list"),
        ({"input_shape": [8, 16, 20.0, 20]}, "input_shape[2]: must be a whole number"),
        ({"input_shape": [8, 16, True, 20]}, "input_shape[2]: must be a whole number"),
        ({"input_shape": [8, 16]}, "input_shape must be 3 to 5 ints"),
        ({"input_shape": [8, 16, 2, 2, 2, 2]}, "input_shape must be 3 to 5 ints"),
        ({"input_shape": [8, 16, 0, 20]}, "input_shape must be 3 to 5 ints"),
        ({"input_shape": [8, 15, 20, 20]}, "input_shape must have 16 channels"),
        ({"input_shape": [8, 16, 20, 20, 20]}, "weight_shape must have 5 dimensions"),
        ({"weight_shape": None}, "weight_shape: must be a list"),
        ({"weight_shape": [32, 16, 33, 3]}, "weight_shape: a kernel of"),
        ({"stride": 0}, "stride must be 2 int"),
        ({"stride": [1, 1, 1]}, "stride must be 2 int"),
        ({"stride": True}, "stride must be 2 int"),
        ({"stride": 1.5}, "stride must be 2 int"),
        ({"padding": -1}, "padding must be"),
        ({"padding": "some"}, "padding must be"),
        ({"padding": [1, 1, 1, 1]}, "padding must be 2 int"),
        ({"dilation": []}, "dilation must be 2 int"),
        ({"groups": [1]}, "groups: must be a whole number"),
        ({"groups": 0}, "groups must be an int of 1"),
        ({"groups": 3, "input_shape": [8, 48, 20, 20]}, "groups must divide"),
        ({"dtype": "half"}, "dtype must be one of float16"),
        ({"dtype": ["float16"]}, "dtype: must be a text"),
        ({"also": "float32"}, "also: must be a list"),
        ({"also": ["int8"]}, "dtype must be one of"),
        ({"also": ["float32", "float32"]}, "also must name something, and nothing twice"),
        ({"also": ["float16"]}, "also must name something, and nothing twice"),
        ({"channels_last": 1}, "channels_last: must be true or false"),
        ({"input_shape": [8, 16, 200], "weight_shape": [32, 16, 3]}, "channels_last must be false"),
        ({"ops": []}, "ops must name something"),
        ({"ops": ["forward"]}, "ops[0]: must be one of fprop, dgrad, wgrad"),
        ({"ops": ["fprop", "fprop"]}, "ops must name something, and nothing twice"),
        ({"ops": [["fprop"]]}, "ops[0]: must be one of fprop, dgrad, wgrad"),
    ],
)
def test_malformed_layer(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**LAYER, "name": "good"}, {**LAYER, **changes})
    with pytest.raises(ValueError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: layer 2")
    assert message in text
    assert ("(middle)" in text) == ("name" not in changes)


def test_the_same_case_twice(tmp_path: Path) -> None:
    again = {**LAYER, "input_shape": [4, 16, 20, 20]}
    with pytest.raises(ValueError, match=r"layer 2 \(middle\): name: middle/fprop/float16/nhwc"):
        load(written(tmp_path, LAYER, again))
    # Another dtype or layout is another case.
    assert len(load(written(tmp_path, LAYER, {**again, "dtype": "bfloat16"}))) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable JSON file"),
        ('{"layers": [', "not a readable JSON file"),
        ("[" * 100_000, "nested too deep"),
        ("[]", "must be an object with"),
        ("{}", "must be an object with"),
        ('{"layers": {}}', "must be an object with"),
        ('{"layers": []}', "layers must not be empty"),
    ],
)
def test_malformed_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


# --- a part of a list


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 400])
def test_shares_are_disjoint_and_complete(cases: list[Case], parts: int) -> None:
    shares = [select(cases, share=(part, parts)) for part in range(1, parts + 1)]
    together = [case.id for share in shares for case in share]
    assert len(together) == len(cases)
    assert set(together) == {case.id for case in cases}
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_pattern_keeps_what_contains_one_of_its_texts(cases: list[Case]) -> None:
    chosen = select(cases, pattern="resnet50_layer4_1x1/dgrad, aspp_12/fprop,")
    assert sorted(case.id for case in chosen) == [
        "deeplabv3_aspp_12/fprop/float16/nhwc",
        "resnet50_layer4_1x1/dgrad/bfloat16/nhwc",
        "resnet50_layer4_1x1/dgrad/float16/nhwc",
        "resnet50_layer4_1x1/dgrad/float32/nhwc",
    ]
    # The share is one of what the pattern leaves.
    assert len(select(cases, pattern="resnet50_layer4_1x1/dgrad", share=(2, 3))) == 1
